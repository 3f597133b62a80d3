"""The one error of the configuration: it lists every problem found, not only the first."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """What is wrong with a configuration: one message, or one line a problem under the name of its source.

    A problem reads ``key: what is wrong: what would be right``.
    """

    def __init__(self, problems: str | Sequence[str], source: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.source = source
        lines = self.problems
        if source or len(lines) > 1:
            count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
            lines = [f"{source}: {count}" if source else count, *(f"  {problem}" for problem in lines)]
        super().__init__("\n".join(lines))

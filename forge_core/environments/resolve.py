"""From the ``environment`` section to environments: by built-in name, or by the path of a class of the user's own.

Invariants: a path is looked up, never evaluated; every failure is a ConfigError that names the key; the user's code is
called by ``check_environment``, which makes one environment to see that it can be made, and by episodes.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_core.config import ConfigError
from forge_core.config.references import revealed
from forge_core.config.run_config import EnvironmentSection, RunConfig
from forge_core.data.importing import ObjectPathError, load_object, source_file
from forge_core.environments.protocol import Environment
from forge_core.redaction import redact

if TYPE_CHECKING:
    from forge_core.environments.rollout import Play

BUILTINS = {
    "calculator": "forge_core.environments.calculator:Calculator",
    "python": "forge_core.environments.python_tool:PythonTool",
    "guess_number": "forge_core.environments.guess:GuessNumber",
}


def full_path(path: str) -> str:
    """``path`` with a built-in name replaced by where it is defined."""
    if ":" in path:
        return path
    if path not in BUILTINS:
        close = difflib.get_close_matches(path, BUILTINS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"environment.path: there is no environment {path!r}; {hint}built-in are {', '.join(BUILTINS)}; your own "
            "is <module>:<name> or <file.py>:<name>"
        )
    return BUILTINS[path]


def environment_class(path: str) -> Callable[..., Environment]:
    try:
        found = load_object(full_path(path))
    except ObjectPathError as error:
        raise ConfigError(f"environment.path: {error}") from error
    missing = [name for name in ("tools", "reset", "step", "close") if not hasattr(found, name)]
    if missing:
        raise ConfigError(f"environment.path: {path} is no environment: it lacks {', '.join(missing)}")
    return found


def environment_source(path: str) -> str:
    """SHA-256 (hex) of the source file that ``path`` names."""
    try:
        return hashlib.sha256(source_file(full_path(path)).read_bytes()).hexdigest()
    except ObjectPathError as error:
        raise ConfigError(f"environment.path: {error}") from error


def tools_of(section: EnvironmentSection | None) -> Sequence[Mapping[str, Any]]:
    """The definitions of what the policy may call."""
    return environment_class(section.path).tools if section is not None else ()  # type: ignore[attr-defined]


def maker(section: EnvironmentSection) -> Callable[[], Environment]:
    """Makes environments with the section's options. Raises ConfigError when that fails."""
    found, options = environment_class(section.path), revealed(section.options, "environment.options")

    def make() -> Environment:
        return found(**options)

    return make


def check_environment(section: EnvironmentSection | None) -> None:
    """Raise ConfigError for an environment that cannot be made on this machine."""
    if section is None:
        return
    make = maker(section)
    try:
        make().close()
    except Exception as error:  # the constructor is the user's code
        raise ConfigError(
            redact(f"environment.path: making {section.path} failed: {type(error).__name__}: {error}")
        ) from error


def build_play(config: RunConfig, tokenizer: Any) -> Play | None:
    """How the episodes of a run are played; None without an environment. Raises ConfigError, and DataError
    when the chat template cannot place what the environment says."""
    from forge_core.environments.rollout import Play
    from forge_core.environments.tool_calls import parser
    from forge_core.environments.turns import TurnRenderer

    section = config.environment
    if section is None:
        return None
    tools = tools_of(section)
    names = [tool["function"]["name"] for tool in tools]
    template = getattr(tokenizer, "chat_template", None)
    parse = parser(section.tool_format, template, section.tool_pattern, names) if tools else lambda text: ()
    chat_template = config.dataset.chat_template if config.dataset else None
    renderer = TurnRenderer(tokenizer, chat_template, tools)
    renderer.after([{"role": "tool" if tools else "user", "content": ""}], ended=True)
    return Play(
        maker(section),
        renderer,
        parse,
        section.max_turns,
        section.max_turn_tokens or config.rollout.max_new_tokens,
        section.turn_timeout_s,
        section.workers,
        concurrent=config.generator.backend == "vllm",
    )

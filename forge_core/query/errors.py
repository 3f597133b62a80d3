"""What a wrong question is answered with."""

from __future__ import annotations

from forge_core.config import ConfigError


class QueryError(ConfigError):
    """The SQL is wrong, or asks for what is not a question."""

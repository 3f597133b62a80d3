"""What ends a run because of its environment."""

from __future__ import annotations


class BrokenEnvironment(ValueError):
    """Too many episodes were dropped because their environments broke. The message has the first reason."""

"""Errors about models: what is wrong with a folder or a file, and what would mend it."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be found, read or used; the message names it and says what to do."""


class WeightsError(ModelError):
    """Weight files that do not fit the model or cannot be read; no parameter was changed."""

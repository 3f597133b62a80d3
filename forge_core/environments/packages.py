"""Packages of other people's environments, which are installed where they are wanted."""

from __future__ import annotations

import importlib
from types import ModuleType

from forge_core.config import ConfigError


def required(module: str, requirement: str) -> ModuleType:
    """``module`` of the package ``requirement`` (as pip takes it). Raises ConfigError when it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"environment.path: this environment needs the package {requirement} ({error}): pip install '{requirement}'"
        ) from error

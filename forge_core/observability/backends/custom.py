"""A backend in the user's own file: ``metric_logging: {custom: {path: my_backend.py:MyBackend}}``.

Invariants:
- The class is made with the run's ``Origin`` and its ``options``: ``MyBackend(origin, **options)``. It has the methods
  of ``Backend``; one that derives from it needs only those that it wants.
- A stored run names the file too, so it is only looked for where this machine offers code (``check_place``).
"""

from __future__ import annotations

from typing import Any

from forge_core.config.any_config import AnyConfig
from forge_core.config.errors import ConfigError
from forge_core.config.metric_sections import CustomBackendSection
from forge_core.data.importing import ObjectPathError, check_place, load_object, misfit
from forge_core.observability.backends import Backend, Origin

METHODS = ("last_step", "log", "log_value", "close")


class CustomBackend:
    """What ``path`` names, made with ``options``: not an object of this class."""

    def __new__(cls, section: CustomBackendSection, origin: Origin) -> Backend:  # type: ignore[misc]
        made: Backend = _found(section)(origin, **section.options)
        return made


def check_backend(config: AnyConfig) -> None:
    """Raise ConfigError when the user's backend cannot be found, lacks a method, or does not take its options."""
    section = config.metric_logging.custom
    if section is None:
        return
    found = _found(section)
    if lacking := [name for name in METHODS if not callable(getattr(found, name, None))]:
        raise ConfigError(
            f"metric_logging.custom.path: {section.path} lacks {', '.join(lacking)}: derive the class from "
            "forge_core.observability.backends.Backend, and write log"
        )
    if error := misfit(found, "origin", **section.options):
        raise ConfigError(
            f"metric_logging.custom.options: {section.path} cannot be made with an origin and "
            f"{section.options}: {error}; its __init__ takes (self, origin) and the options by name"
        ) from error


def _found(section: CustomBackendSection) -> Any:
    try:
        check_place(section.path)
        return load_object(section.path)
    except ObjectPathError as error:
        raise ConfigError(f"metric_logging.custom.path: {error}") from error

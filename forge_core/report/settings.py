"""Configurations of runs side by side, as they are stored: runs of other releases too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = "–"
OWN = ("run.id", "store")  # in which two runs always differ


def differences(configs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The keys in which configurations differ, with the value of each; ``ABSENT`` for a key that one lacks."""
    flat = [dict(_flat(config, "")) for config in configs.values()]
    keys = sorted({key for one in flat for key in one if not key.startswith(OWN)})
    rows = [(key, [shown(one[key]) if key in one else ABSENT for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    if not items or not value:
        yield path, value
    else:
        for key, below in items:
            yield from _flat(below, f"{path}.{key}" if path else str(key))


def shown(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)

"""What a store holds, by run and kind."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from forge_core.store.store import Store

NO_RUN = ""


@dataclass(frozen=True, order=True)
class Usage:
    """``objects`` keys with ``bytes`` bytes of one ``kind`` (the folder in which they lie) of ``run``."""

    run: str
    kind: str
    objects: int
    bytes: int


def usage(store: Store) -> list[Usage]:
    """By run (``NO_RUN`` for what belongs to none) and kind. Lists the whole store."""
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for key, size in store.sizes("").items():
        sizes[_place(key)].append(size)
    for upload in store.unfinished():
        sizes[(_place(upload.path)[0], "unfinished")].append(upload.size)
    return sorted(Usage(run, kind, len(all_), sum(all_)) for (run, kind), all_ in sizes.items())


def _place(key: str) -> tuple[str, str]:
    first, *rest = key.split("/")
    return (rest[0], rest[1]) if first == "runs" and len(rest) > 1 else (NO_RUN, first)

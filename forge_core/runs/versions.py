"""Which versions of a run stand out.

Invariant: a summary in the store says what the first ``steps`` entries of the ledger came to, and names the last of
them by its digest, which covers all before it (they are a chain): so it is right or it is not used, and the ledger is
read from there on. Whoever overwrites it writes another such summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from forge_core.observability.entries import held_out
from forge_core.store import Ledger, NotFound, Store, entry_digest, layout

VALIDATION = "validation/loss"  # of the version that an entry makes


@dataclass(frozen=True)
class Best:
    """Of the first ``steps`` training steps, the last of which has the digest ``entry``: the ``version`` with the best
    evaluation ``reward`` (the first of equals); None when none was evaluated. A supervised run has a validation loss
    in its stead: its reward is the loss with the other sign."""

    steps: int = 0
    entry: str | None = None
    version: int | None = None
    reward: float | None = None


def best_version(store: Store, run_id: str) -> Best:
    """The best of all committed steps. Reads the entries since the summary was written."""
    ledger = Ledger(store, run_id)
    head = ledger.head()
    best = _summary(store, ledger, run_id, head)
    for batch in range(best.steps, head):
        entry = ledger.required(batch)
        best = replace(best, steps=batch + 1, entry=entry_digest(entry))
        for version, reward in _evaluated(entry):
            if best.reward is None or reward > best.reward:
                best = replace(best, reward=reward, version=version)
    return best


def _evaluated(entry: Mapping[str, Any]) -> Iterable[tuple[int, float]]:
    """Version and reward of each evaluation that an entry records."""
    metrics = entry["metrics"]
    if VALIDATION in metrics:
        return [(entry["version_out"], -metrics[VALIDATION])]
    return [(version, reward) for version, reward, *_ in held_out([entry])]


def remember(store: Store, run_id: str, best: Best) -> None:
    """Write the summary, so that the next look-up reads only the entries since."""
    store.put_json(layout.best(run_id), asdict(best))


def _summary(store: Store, ledger: Ledger, run_id: str, head: int) -> Best:
    """The stored summary, if it is one of this ledger."""
    try:
        known = Best(**store.read_json(layout.best(run_id)))
    except NotFound:
        return Best()
    last = ledger.entry(known.steps - 1) if 0 < known.steps <= head else None
    return known if last is not None and entry_digest(last) == known.entry else Best()

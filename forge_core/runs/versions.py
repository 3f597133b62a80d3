"""Which versions of a run stand out.

Invariant: a summary in the store says what the first ``steps`` entries of the ledger came to, and names the last of
them by its digest, which covers all before it (they are a chain): so it is right or it is not used, and the ledger is
read from there on. Whoever overwrites it writes another such summary.
"""

from __future__ import annotations

from typing import Any

from forge_core.store import Ledger, NotFound, Store, entry_digest, layout

REWARD = "eval/reward/mean"
NOTHING: dict[str, Any] = {"steps": 0, "entry": None, "version": None, "reward": None}


def best_version(store: Store, run_id: str, *, remember: bool = False) -> int | None:
    """The version with the best evaluation reward (the first of equals), or None when none was evaluated.

    ``remember``: leave a summary, so that the next look-up reads only the entries since.
    """
    ledger = Ledger(store, run_id)
    head = ledger.head()
    known = _summary(store, ledger, run_id, head)
    best = dict(known)
    for batch in range(known["steps"], head):
        entry = ledger.required(batch)
        best |= {"steps": batch + 1, "entry": entry_digest(entry)}
        reward = entry["metrics"].get(REWARD)
        if reward is not None and (best["reward"] is None or reward > best["reward"]):
            best |= {"reward": reward, "version": int(entry["metrics"]["eval/version"])}
    if remember and best != known:
        store.put_json(layout.best(run_id), best)
    return best["version"]


def _summary(store: Store, ledger: Ledger, run_id: str, head: int) -> dict[str, Any]:
    """The stored summary, if it is one of this ledger."""
    try:
        known = store.read_json(layout.best(run_id))
    except NotFound:
        return NOTHING
    last = ledger.entry(known["steps"] - 1) if 0 < known["steps"] <= head else None
    return known if last is not None and entry_digest(last) == known["entry"] else NOTHING

"""Ledger entries for tests, and a run that is made of nothing else."""

from __future__ import annotations

from typing import Any

from forge_core.store import Ledger, Store, layout

RUN = "run-1"


def init_entry(attempt: str = "a0", **changes: Any) -> dict[str, Any]:
    entry = {
        "version": 0,
        "weights": layout.weights(RUN, 0, attempt),
        "weights_digest": "w0",
        "state_digest": "s0",
        "model": "scratch",
        "started_at": "2026-01-01T00:00:00+00:00",
        "finished_at": "2026-01-01T00:00:01+00:00",
        "metrics": {"eval/reward/mean": 0.3},
    }
    return {**entry, **changes}


def entry(batch: int, previous: str, attempt: str = "a0", **changes: Any) -> dict[str, Any]:
    shard = (RUN, batch, 0, 0)
    made = {
        "batch": batch,
        "version_in": batch,
        "version_out": batch + 1,
        "max_age": 1,
        "episodes": {"planned": 8, "trained": 6, "dropped": {"zero_advantage": 2}},
        "tokens": 100,
        "plans": [layout.plan(RUN, batch, 0)],
        "shards": {
            "episodes": [layout.episodes(*shard)],
            "rewards": [layout.rewards(*shard)],
            "reference": [layout.reference(*shard)],
        },
        "training": layout.training(RUN, batch, attempt),
        "training_digest": f"t{batch}",
        "weights": layout.weights(RUN, batch + 1, attempt),
        "weights_digest": f"w{batch + 1}",
        "attempt": attempt,
        "previous": previous,
        "state_digest": f"s{batch + 1}",
        "cursor": {"epoch": 0, "index": 8 * (batch + 1)},
        "metrics": {"reward/mean": 0.5, "loss": 0.1, "time/train": 1.5},
        "started_at": "2026-01-01T00:00:00+00:00",
        "finished_at": "2026-01-01T00:00:01+00:00",
    }
    return {**made, **changes}


def committed(store: Store, steps: int) -> Ledger:
    """A run with ``steps`` committed training steps."""
    ledger = Ledger(store, RUN)
    assert ledger.commit_init(init_entry())
    for batch in range(steps):
        assert ledger.commit(entry(batch, ledger.previous(batch)))
    return ledger

"""The ledger and the versions of the weights as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa

from forge_core.observability.entries import held_out
from forge_core.store import Ledger, Store, layout
from forge_core.store.store import READERS

TIME = pa.timestamp("ms", tz="UTC")
LEDGER = pa.schema(
    [
        ("run_id", pa.string()),
        ("batch", pa.int64()),  # null: the entry of version 0
        ("version_in", pa.int64()),
        ("version_out", pa.int64()),
        ("max_age", pa.int64()),
        ("planned", pa.int64()),
        ("trained", pa.int64()),
        ("dropped", pa.map_(pa.string(), pa.int64())),  # by reason
        ("tokens", pa.int64()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("training", pa.string()),  # prefix of the object
        ("weights", pa.string()),
        ("weights_digest", pa.string()),
        ("state_digest", pa.string()),
        ("attempt", pa.string()),
        ("started_at", TIME),
        ("finished_at", TIME),
        ("seconds", pa.float64()),  # of the train task
    ]
)
WEIGHTS = pa.schema(
    [
        ("run_id", pa.string()),
        ("version", pa.int64()),
        ("weights", pa.string()),  # prefix; a step that trained nothing has that of the version before
        ("weights_digest", pa.string()),
        ("committed_at", TIME),
        ("eval_reward", pa.float64()),  # on held-out prompts; null: not evaluated
        ("stored", pa.bool_()),  # false: deleted since, as nothing needs it
        ("files", pa.int64()),
        ("bytes", pa.int64()),
    ]
)


class Made(NamedTuple):
    """A table that is made of JSON objects."""

    schema: pa.Schema
    make: Callable[[Store, list[str]], pa.Table]


def ledger_table(store: Store, run_ids: list[str]) -> pa.Table:
    """An entry of the ledger a row, that of version 0 first."""
    rows = [_ledger_row(run_id, entry) for run_id in run_ids for entry in _entries(store, run_id)]
    return pa.Table.from_pylist(rows, schema=LEDGER)


def weights_table(store: Store, run_ids: list[str]) -> pa.Table:
    """A committed version a row."""
    return pa.Table.from_pylist([row for run_id in run_ids for row in _weights_rows(store, run_id)], schema=WEIGHTS)


def _entries(store: Store, run_id: str) -> list[dict[str, Any]]:
    """Those of version 0 and of all committed steps; a run without version 0 has none."""
    ledger = Ledger(store, run_id)
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(ledger.required, range(-1, ledger.head())))


def _ledger_row(run_id: str, entry: dict[str, Any]) -> dict[str, Any]:
    counts = entry.get("episodes", {"planned": None, "trained": None, "dropped": {}})
    named = (
        "batch",
        "version_in",
        "max_age",
        "tokens",
        "training",
        "weights",
        "weights_digest",
        "state_digest",
        "attempt",
    )
    times = {key: datetime.fromisoformat(entry[key]) for key in ("started_at", "finished_at")}
    return {
        "run_id": run_id,
        **{key: entry.get(key) for key in named},
        "version_out": entry.get("version_out", 0),
        "planned": counts["planned"],
        "trained": counts["trained"],
        "dropped": list(counts["dropped"].items()),
        "metrics": list(entry["metrics"].items()),
        **times,
        "seconds": (times["finished_at"] - times["started_at"]).total_seconds(),
    }


def _weights_rows(store: Store, run_id: str) -> Iterator[dict[str, Any]]:
    sizes: dict[str, list[int]] = defaultdict(list)
    for key, size in store.sizes(f"{layout.run(run_id)}weights").items():
        if key.endswith(".safetensors"):
            sizes[key.rpartition("/")[0] + "/"].append(size)
    entries = _entries(store, run_id)
    rewards = {version: mean for version, mean, *_ in held_out(entries)}
    for entry in entries:
        version, prefix = entry.get("version_out", 0), entry["weights"]
        yield {
            "run_id": run_id,
            "version": version,
            "weights": prefix,
            "weights_digest": entry["weights_digest"],
            "committed_at": datetime.fromisoformat(entry["finished_at"]),
            "eval_reward": rewards.get(version),
            "stored": prefix in sizes,
            "files": len(sizes.get(prefix, [])),
            "bytes": sum(sizes.get(prefix, [])),
        }

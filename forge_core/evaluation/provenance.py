"""Where a version of a run comes from: the record that the registry keeps of it.

Invariant: everything is read from what the run itself stored (its ledger, plans and configuration), so a record tells
what the weights were made of, not what a data set holds today.
"""

from __future__ import annotations

from typing import Any

from forge_core.models.stored import RunVersion, parse_run_version
from forge_core.runs.record import load_run
from forge_core.store import Ledger, Store, digest, layout
from forge_core.weights.registry import Record


def version_record(
    store: Store,
    run_id: str,
    version: int,
    *,
    evaluation: dict[str, Any] | None,
    data: dict[str, Any] | None = None,
) -> Record:
    """The registry's record of a committed version. ``data``: what a retraining knows about its rows."""
    ledger, config = Ledger(store, run_id), load_run(store, run_id).config
    entry = ledger.entry(version - 1) if version else ledger.init()
    assert entry is not None
    dataset = config.dataset.model_dump(include={"path", "name", "split", "revision"}) if config.dataset else {}
    return {
        "weights": entry["weights"],
        "weights_digest": entry["weights_digest"],
        "run_id": run_id,
        "version": version,
        "promoted_at": None,
        "evaluation": evaluation,
        "parent": parent_of(store, config.model),
        "data": {**dataset, **trained_prompts(store, run_id, version), **(data or {})},
        "replaced": None,
    }


def parent_of(store: Store, model: Any) -> dict[str, Any]:
    """The model that a run started from: a version of another run, or what its configuration names."""
    parent = parse_run_version(model) if isinstance(model, str) else None
    if parent is None:
        return {"model": model if isinstance(model, str) else "made on the spot"}
    return {"run_id": parent.run_id, "version": parent.version, "weights_digest": weights_digest(store, parent)}


def weights_digest(store: Store, wanted: RunVersion) -> str:
    ledger = Ledger(store, wanted.run_id)
    entry = ledger.entry(wanted.version - 1) if wanted.version else ledger.init()
    return str(entry["weights_digest"]) if entry else ""


def trained_prompts(store: Store, run_id: str, version: int) -> dict[str, Any]:
    """How many distinct prompts the plans of the steps up to ``version`` hold, and the digest of their ids."""
    ledger, seen = Ledger(store, run_id), set()
    for batch in range(version):
        entry = ledger.entry(batch)
        for key in entry["plans"] if entry else [layout.plan(run_id, batch, 0)]:
            seen |= {group["prompt_id"] for group in store.read_json(key)["groups"]}
    return {"trained_prompts": len(seen), "trained_prompts_digest": digest(sorted(seen))}

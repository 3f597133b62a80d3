"""Registry records of runs that are nothing but published weights."""

from __future__ import annotations

from typing import Any

from forge_core.store import Store, layout


def record(run_id: str, version: int = 1, **changes: Any) -> dict[str, Any]:
    """A record whose weights nobody has published."""
    made = {
        "weights": layout.weights(run_id, version, "a0"),
        "weights_digest": f"digest of {run_id} {version}",
        "run_id": run_id,
        "version": version,
        "promoted_at": None,
        "evaluation": None,
        "parent": {"model": "made on the spot"},
        "data": {"path": "prompts.jsonl"},
        "replaced": None,
    }
    return {**made, **changes}


def published(store: Store, run_id: str, version: int = 1) -> dict[str, Any]:
    """A record whose weights are in the store."""
    prefix = layout.weights(run_id, version, "a0")
    files = {"model.safetensors": f"{run_id} {version}".encode()}
    manifest = store.publish(prefix, files, request=f"{run_id} {version}")
    return record(run_id, version, weights=prefix, weights_digest=manifest.content)

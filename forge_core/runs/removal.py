"""Removing a run with everything that is stored of it.

Invariants:
- ``run.json`` goes last: a removal that was killed is repeated by its command, and until then the run keeps its name.
- Manifests go first: what is half removed is no object.
- Nothing that others need is removed unasked: the registry, runs made from this one's episodes or weights or that
  distil them, processes that work on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_core.runs.garbage import registered_weights
from forge_core.runs.liveness import workers
from forge_core.store import Store, StoreError, layout
from forge_core.store.deletion import delete_objects

ROUNDS = 5  # of listing and deleting, while somebody still writes


def run_ids(store: Store) -> list[str]:
    """The runs of which there is anything."""
    return store.folders("runs")


def references(store: Store, run_id: str) -> list[str]:
    """Who refers to the run or works on it, in words."""
    return [*_of_registry(store, run_id), *_of_runs(store, run_id), *_at_work(store, run_id)]


def remove_run(store: Store, run_id: str) -> None:
    """Delete everything of ``run_id``. Raises StoreError when somebody goes on writing to it."""
    last = layout.run_json(run_id)
    for _ in range(ROUNDS):
        keys = [key for key in store.list(layout.run(run_id)) if key != last]
        if not keys:
            store.delete(last)
            return
        delete_objects(store, keys)
    raise StoreError(
        f"{layout.run(run_id)} in the store {store.uri} is being written to while it is removed: end the run "
        f"(forge stop {run_id}), then remove it again"
    )


def _of_registry(store: Store, run_id: str) -> Iterator[str]:
    for prefix in sorted(registered_weights(store)):
        if prefix.startswith(layout.run(run_id)):
            yield f"the registry stands for {prefix}, or would go back to it"


def _of_runs(store: Store, run_id: str) -> Iterator[str]:
    for other in run_ids(store):
        key = layout.run_json(other)
        if other == run_id or not store.exists(key):
            continue
        body = store.read_json(key)
        parent, config = body.get("parent", {}), _newest_config(store, other) or body["config"]
        loss = config.get("loss")
        if run_id in (parent.get("run_id"), parent.get("sampler")):
            yield f"the run {other} was made from its episodes"
        if _is_version(config.get("model"), run_id):
            yield f"the run {other} begins with {config['model']}"
        if isinstance(loss, dict) and _is_version(loss.get("teacher"), run_id):
            yield f"the run {other} distils {loss['teacher']}"


def _newest_config(store: Store, run_id: str) -> dict[str, Any] | None:
    """What a resume has changed the configuration to, as it is stored: that of other releases too."""
    changes = 0
    while store.exists(layout.config_change(run_id, changes)):
        changes += 1
    return store.read_json(layout.config_change(run_id, changes - 1))["config"] if changes else None


def _is_version(model: object, run_id: str) -> bool:
    return isinstance(model, str) and model.startswith(f"run://{run_id}/")


def _at_work(store: Store, run_id: str) -> Iterator[str]:
    for worker in workers(store, run_id):
        if worker.alive:
            yield (
                f"a process of it ({worker.role}, on {worker.host}) gave a sign of life {worker.silent_s:.0f} s ago: "
                f"end it with forge stop {run_id}; one that was killed is silent soon"
            )

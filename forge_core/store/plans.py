"""Plans: what a batch is made of, decided once. The first writer wins, and everybody reads its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.store import layout
from forge_core.store.store import Store


def put_plan(store: Store, run_id: str, batch: int, round: int, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Store ``plan`` unless there is one, and return the plan that holds, as it is stored."""
    store.put_new_json(layout.plan(run_id, batch, round), plan)
    return read_plan(store, run_id, batch, round)


def read_plan(store: Store, run_id: str, batch: int, round: int) -> dict[str, Any]:
    """The plan of ``round`` of ``batch``. Raises NotFound."""
    return store.read_json(layout.plan(run_id, batch, round))

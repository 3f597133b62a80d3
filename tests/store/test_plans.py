"""A plan is decided once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forge_core.store import NotFound, Store, layout
from forge_core.store.plans import put_plan, read_plan


def test_the_first_plan_holds_for_everybody(memory: Store) -> None:
    barrier = threading.Barrier(10)

    def plan(number: int) -> dict[str, object]:
        barrier.wait()
        return put_plan(memory, "r", 3, 0, {"by": number, "rows": (1, 2)})

    with ThreadPoolExecutor(10) as pool:
        plans = list(pool.map(plan, range(10)))
    assert all(plan == plans[0] for plan in plans)
    assert plans[0] == read_plan(memory, "r", 3, 0) == {"by": plans[0]["by"], "rows": [1, 2]}
    assert memory.list("runs/r/plans") == ["runs/r/plans/00000003/00000000.json"]


def test_a_missing_plan_names_its_key(memory: Store) -> None:
    with pytest.raises(NotFound, match=r"runs/r/plans/00000001/00000002.json"):
        read_plan(memory, "r", 1, 2)


def test_the_layout_is_the_published_one() -> None:
    assert layout.run_json("r") == "runs/r/run.json"
    assert layout.episodes("r", 1, 2, 3) == "runs/r/episodes/00000001/00000002-00000003/"
    assert layout.rewards("r", 1, 2, 3) == "runs/r/rewards/00000001/00000002-00000003/"
    assert layout.reference("r", 1, 2, 3) == "runs/r/reference/00000001/00000002-00000003/"
    assert layout.training("r", 1, "a") == "runs/r/training/00000001-a/"
    assert layout.weights("r", 2, "a") == "runs/r/weights/00000002-a/"
    assert layout.ledger("r", 1) == "runs/r/ledger/00000001.json"
    assert layout.ledger_init("r") == "runs/r/ledger/init.json"
    assert layout.checkpoint("r", 1, "a") == "runs/r/checkpoints/00000001-a/"
    assert layout.stop("r", 0) == "runs/r/control/stop-00000000.json"
    assert layout.evaluation("r", 7, "0123456789abcdef") == "runs/r/evaluations/00000007-0123456789ab/"
    with pytest.raises(ValueError, match="count from 0, got -1"):
        layout.ledger("r", -1)

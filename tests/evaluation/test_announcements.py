"""An evaluation that finds a model to be worse than another says so with the event that starts a retraining."""

from __future__ import annotations

import time
import uuid
from typing import Any

import httpx
import pytest
from prefect.events.worker import EventsWorker

from flows.deploying_automations import RETRAIN_EVENTS
from flows.evaluate import _told
from flows.server import ServerHandle
from forge_core.config import load_config
from forge_core.evaluation.asking import Question
from forge_core.evaluation.policies import Policy
from forge_core.store import open_store
from tests.evaluation.test_results import evaluation


def announced(server: ServerHandle, model: str) -> list[dict[str, Any]]:
    """Events about ``model``."""
    EventsWorker.instance().drain()
    wanted = {"filter": {"resource": {"id": [f"forge.model.{model}"]}}}
    deadline = time.monotonic() + 30.0
    while not (found := httpx.post(f"{server.url}/events/filter", json=wanted, timeout=30).json()["events"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return list(found)


@pytest.mark.server
@pytest.mark.parametrize(
    ("rewards", "event"),
    [(0.2, "forge.eval.regressed"), (0.8, "forge.eval.done"), (0.5, "forge.eval.done")],
    ids=["worse", "better", "equal"],
)
def test_a_model_that_is_worse_with_confidence_has_regressed(
    prefect_server: ServerHandle, rewards: float, event: str
) -> None:
    name = uuid.uuid4().hex
    policies = [Policy(f"model://{name}", "a"), Policy(f"model://{name}/production", "b")]
    question = Question(open_store(f"memory://{name}"), load_config({}), policies)
    both = [evaluation({p: [reward] for p in range(9)}, f"evaluations/{reward}/") for reward in (rewards, 0.5)]
    _told(question, both)
    (found,) = announced(prefect_server, name)
    assert found["event"] == event
    assert found["payload"]["rewards"] == pytest.approx([rewards, 0.5])
    assert (event in RETRAIN_EVENTS) == (event == "forge.eval.regressed")

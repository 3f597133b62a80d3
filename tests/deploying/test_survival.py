"""The end of the run that test_operating.py left lying; last of its folder, so that others pass the time."""

from __future__ import annotations

import time

import pytest

from flows.deploying_automations import SILENCE
from forge_core.runs.record import load_run
from tests.deploying.conftest import KILLED_STEPS, RESTARTED, SMALL, Operator


@pytest.mark.server
@pytest.mark.engine
def test_a_run_killed_with_its_worker_is_found_started_again_and_finishes(operator: Operator, killed: str):
    started = time.monotonic()
    operator.wait("the end of the killed run", lambda: operator.ended(killed), SILENCE.total_seconds() + 180)
    print(f"waited {time.monotonic() - started:.0f} s for the killed run")
    assert operator.history(killed) == RESTARTED
    assert ("Crashed", "no heartbeat: worker and flow are gone") in operator.states(killed)
    run = operator.flow_run(killed)
    assert run["run_count"] == 2
    assert operator.committed(run["name"]) == KILLED_STEPS
    assert run["parameters"]["overrides"] == {**SMALL, "steps": KILLED_STEPS, "checkpoint.interval": 2}
    runs = [load_run(operator.store, name) for name in operator.store.folders("runs")]
    asked = operator.api("/flow_runs/filter", {"deployments": {"name": {"any_": ["quickstart"]}}})
    assert sorted(r.run_id for r in runs if r.flow == "grpo") == sorted(r["name"] for r in asked), "one run for each"

"""Single kills: of a flow whose worker lives, and of a worker whose flow lives. (Both together: test_operating.py.)"""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from flows.restarting import CRASHES
from tests.deploying.conftest import RESTARTED, Operator

pytestmark = [pytest.mark.server, pytest.mark.engine]


@pytest.fixture(scope="module", autouse=True)
def worker(operator: Operator, deployed: dict[str, str]) -> Iterator[psutil.Process]:
    """A worker; none is left to take the runs of other tests."""
    yield operator.start_worker("trainer")
    operator.end_workers()


def flow_process(worker: psutil.Process) -> psutil.Process:
    return next(p for p in worker.children() if "prefect.engine" in p.cmdline())


def until(operator: Operator, flow_run: str, steps: int) -> None:
    operator.wait(f"{steps} steps", lambda: operator.committed(operator.flow_run(flow_run)["name"]) >= steps)


@pytest.mark.soak
def test_a_killed_flow_starts_again_and_finishes(operator: Operator, worker: psutil.Process):
    flow_run = operator.run("grpo/quickstart", steps=40, **{"checkpoint.interval": 4})
    until(operator, flow_run, 10)
    flow_process(worker).kill()
    operator.wait("the end", lambda: operator.ended(flow_run))
    assert operator.history(flow_run) == RESTARTED
    assert operator.flow_run(flow_run)["state"]["message"] == "40 training steps committed"


@pytest.mark.soak
def test_a_flow_that_is_killed_at_every_start_fails_at_last(operator: Operator, worker: psutil.Process):
    flow_run = operator.run("grpo/quickstart", steps=4000, **{"warm_start.steps": 4000})
    for start in range(1, CRASHES + 2):
        operator.wait(f"start {start}", lambda: operator.flow_run(flow_run)["run_count"] == start)  # noqa: B023
        name = operator.flow_run(flow_run)["name"]
        operator.wait("its run", lambda: operator.store.exists(f"runs/{name}/run.json"))  # noqa: B023
        flow_process(worker).kill()
    operator.wait("the end", lambda: operator.ended(flow_run))
    state = operator.flow_run(flow_run)["state"]
    assert state["type"] == "FAILED"
    assert f"was started {CRASHES + 2} times and has finished 0 batches" in state["message"]


def test_a_flow_whose_worker_was_killed_finishes_and_is_not_trained_twice(operator: Operator, worker: psutil.Process):
    flow_run = operator.run("grpo/quickstart", steps=60)
    until(operator, flow_run, 5)
    worker.kill()
    operator.start_worker("trainer")
    until(operator, flow_run, 60)
    operator.wait("the end", lambda: operator.ended(flow_run), limit_s=180)
    assert operator.history(flow_run) == ["Scheduled", "Running", "Completed"]
    assert operator.flow_run(flow_run)["state"]["message"] == "60 training steps committed"

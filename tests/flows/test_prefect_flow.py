"""The loop on real Prefect tasks: errors, what 300 steps cost the process, and what the UI shows of a real run."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect import flow, task

from flows.grpo import grpo, iterate
from flows.server import ServerHandle
from flows.window import Window
from forge_core.config import RunConfig
from forge_core.runs import RunRef
from forge_core.runs.context import RunContext
from forge_core.runs.liveness import workers
from forge_core.store import open_store
from tasks import Stages
from tests.report.test_real_run import FIGURES
from tests.runs.harness import TINY

REF = RunRef("trivial", "memory://trivial")
SHARDS = 2
WARM_UP, STEPS = 50, 300


@task
def rollout(run: RunRef, batch: int, shard: int) -> int:
    return shard


@task
def score(run: RunRef, batch: int, episodes: int) -> int:
    return episodes


@task
def reference(run: RunRef, batch: int, episodes: int) -> int:
    return episodes


@task
def train(run: RunRef, batch: int, *shards: Any) -> int:
    return batch + 1


def config(steps: int, max_staleness: int, beta: float = 0.1) -> RunConfig:
    return RunConfig(steps=steps, max_staleness=max_staleness, grpo={"beta": beta}, eval={"prompts": 0})


@pytest.mark.server
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_failed_task_stops_the_flow_at_once_with_its_own_error(
    max_staleness: int, prefect_server: ServerHandle
) -> None:
    opened: list[int] = []

    @task
    def counted_rollout(run: RunRef, batch: int, shard: int) -> int:
        opened.append(batch)
        return shard

    @task
    def failing_score(run: RunRef, batch: int, episodes: int) -> int:
        if (batch, episodes) == (3, 1):
            raise LookupError("the verifier has no such problem")
        return episodes

    @flow
    def fails() -> None:
        stages = Stages(rollout=counted_rollout, score=failing_score, reference=reference, train=train)
        iterate(REF, stages, Window(), config(50, max_staleness), 0, SHARDS)

    started = time.monotonic()
    with pytest.raises(LookupError, match="no such problem") as caught:
        fails()
    assert caught.value.__notes__ == ["in score of batch 3, shard 1"]
    assert max(opened) <= 3 + max_staleness, "no batch was opened after the failure"
    assert time.monotonic() - started < 30


def api(server: ServerHandle, path: str, body: Any) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


@pytest.mark.server
@pytest.mark.engine
def test_a_real_run_reads_well_in_the_ui(
    prefect_server: ServerHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the reward curve goes
    ahead: list[int] = []
    monkeypatch.setattr(RunContext, "load_trainer", lambda self, version: ahead.append(version))
    monkeypatch.setattr(RunContext, "start_grading", lambda self, version: ahead.append(version))
    overrides = {"store": str(tmp_path), "steps": 2, "run.id": "reads-well", "grpo.beta": 0.1, "max_staleness": 1}
    state: Any = grpo({**TINY}, overrides, return_state=True)  # type: ignore[arg-type]
    assert state.is_completed(), state.message
    assert state.message == "2 training steps committed"
    assert ahead == [0, 0], "the trainer may load, and grading processes start, while the first batch is sampled"
    (worker,) = workers(open_store(str(tmp_path)), "reads-well")
    assert (worker.made, worker.ended, worker.failed) == (2, True, False)
    run = {"flow_runs": {"name": {"any_": ["reads-well"]}}}
    (flow_run,) = api(prefect_server, "/flow_runs/filter", run)
    assert flow_run["state"]["type"] == "COMPLETED"
    wanted = sorted(
        ["initialise v=0", "evaluate v=0", "train b=0", "train b=1"]
        + [f"rollout b={b} v=0 shard={s}" for b in (0, 1) for s in (0, 1)]
        + [f"score b={b} shard={s}" for b in (0, 1) for s in (0, 1)]
        + [f"reference b={b}" for b in (0, 1) for _ in (0, 1)]
    )
    deadline = time.monotonic() + 60  # task runs reach the server as events, in the background
    while (names := task_run_names(prefect_server, run)) != wanted:
        assert time.monotonic() < deadline, names
        time.sleep(0.5)
    artifacts = api(prefect_server, "/artifacts/filter", run)
    shown = {a["key"]: a["type"] for a in artifacts}
    shown.setdefault("reads-well-throughput", "image")  # of steps whose metrics were stored when it was drawn
    assert shown == {
        "reads-well-progress": "progress",
        "reads-well-steps": "table",
        **{f"reads-well-{name}": "image" for name in FIGURES},
    }
    data = {a["key"].removeprefix("reads-well-"): a["data"] for a in artifacts}
    assert data["progress"] == 100
    assert len(json.loads(data["steps"])) == 2
    assert data["reward"].startswith("data:image/png;base64,")


def task_run_names(server: ServerHandle, run: dict[str, Any]) -> list[str]:
    return sorted(t["name"] for t in api(server, "/task_runs/filter", run) if t["state"]["type"] == "COMPLETED")


@pytest.mark.server
def test_300_steps_neither_grow_the_process_nor_leave_threads_or_files(prefect_server: ServerHandle) -> None:
    """Over half a minute: 300 steps of five tasks, at some 20 ms a task. Last of its module: the server needs a while
    to write down what it was told."""
    process = psutil.Process()
    seen: list[tuple[int, float, int, int]] = []

    @task
    def watched_train(run: RunRef, batch: int, *shards: Any) -> int:
        if batch in (WARM_UP, STEPS - 1):
            gc.collect()
            seen.append(
                (batch, process.memory_info().rss / 1e6, threading.active_count(), len(os.listdir("/proc/self/fd")))
            )
        return batch + 1

    @flow
    def trivial() -> None:
        stages = Stages(rollout=rollout, score=score, reference=reference, train=watched_train)
        iterate(REF, stages, Window(), config(STEPS, 1, beta=0), 0, SHARDS)

    started = time.monotonic()
    trivial()
    (first, rss, threads, files), (last, rss_after, threads_after, files_after) = seen
    growth = (rss_after - rss) / (last - first)
    print(
        f"{(time.monotonic() - started) / STEPS * 1e3:.0f} ms a step; {growth:.3f} MB a step ({rss:.0f} to "
        f"{rss_after:.0f} MB); threads {threads} to {threads_after}; open files {files} to {files_after}"
    )
    assert growth < 0.15
    assert threads_after <= threads + 2, "the task runner's pool, which is as large as the window"
    assert files_after <= files + 2

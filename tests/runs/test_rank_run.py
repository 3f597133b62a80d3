"""Runs whose trainer is two ranks: equal to one rank's, through a stop, a killed rank and a change of the ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from forge_core.config import ConfigError
from forge_core.models.weights import read_tensors
from forge_core.processes import ChildDied
from forge_core.runs.context import RunContext
from forge_core.runs.initialise import initialise
from forge_core.runs.record import load_run, resume_run
from forge_core.runs.sealing import seal
from forge_core.runs.training import train_batch
from forge_core.stop import Stopped, StopToken
from tests.runs.harness import OPENED, advance, make_batch, memory, new_run, opened, tiny

pytestmark = pytest.mark.engine

COMMON = ("eval.prompts=0", "training.token_budget=128", "training.eps=1e-6", "checkpoint.interval=2", "grpo.beta=0.1")
TWO = (*COMMON, "parallelism.data_parallel_shard_degree=2")
OWN_PROCESS = "training.own_process=true"
METRICS = ("loss", "grad_norm", "entropy", "kl", "mismatch/max_abs_logprob")


def stopped_during_a_step(ctx: RunContext) -> float:
    """Seconds from the stop token, set while rank 0 waits for rank 1 in a step, to ``Stopped``."""
    pid, batch = ctx.trainer._trainer._pids[1], ctx.ledger.head()
    make_batch(ctx, batch)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.5, ctx.stop.set, ("the test says so",)).start()
    threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
    started = time.monotonic()
    with pytest.raises(Stopped, match="the test says so"):
        train_batch(ctx, batch)
    return time.monotonic() - started - 1.0


def killed_during_a_step(ctx: RunContext) -> tuple[float, str]:
    """Seconds from ``kill -9`` of rank 1, while rank 0 waits for it in a collective, to the error; and the error."""
    pid, batch = ctx.trainer._trainer._pids[1], ctx.ledger.head()
    make_batch(ctx, batch)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(ChildDied) as caught:
        train_batch(ctx, batch)
    return time.monotonic() - started - 1.0, str(caught.value)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    ctx = advance(new_run(str(tmp_path_factory.mktemp("one")), *COMMON), 4)
    OPENED.remove(ctx)
    return ctx


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two ranks take a step, are stopped in the second, one is killed in the third, and three steps are done."""
    ctx = advance(new_run(str(tmp_path_factory.mktemp("two")), *TWO), 1)
    found: dict[str, Any] = {"ctx": ctx}
    found["stop_s"], found["alive"] = stopped_during_a_step(ctx), ctx.trainer._trainer.alive()
    ctx.stop = StopToken()
    found["pids"] = dict(advance(ctx, 2).trainer._trainer._pids)
    found["kill_s"], found["error"] = killed_during_a_step(ctx)
    found["left"] = [pid for pid in found["pids"].values() if psutil.pid_exists(pid)]
    advance(ctx, 3)
    ctx.close()
    OPENED.remove(ctx)
    return found


def assert_equal_versions(ctx: RunContext, other: RunContext, version: int) -> None:
    ours, theirs = (read_tensors(c.weights_dir(version)) for c in (ctx, other))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5, msg=name)


def test_two_ranks_make_the_run_of_one(story: dict[str, Any], one_rank: RunContext) -> None:
    ctx = story["ctx"]
    assert ctx.ledger.verify() == 3
    for ours, theirs in zip(ctx.ledger.entries(), one_rank.ledger.entries(), strict=False):
        for name in METRICS:
            assert ours["metrics"][name] == pytest.approx(theirs["metrics"][name], rel=1e-5, abs=1e-6), name
        assert_equal_versions(ctx, one_rank, ours["version_out"])


def test_all_ranks_write_weights_and_checkpoints(story: dict[str, Any]) -> None:
    ctx = story["ctx"]
    entry = ctx.ledger.entry(1)
    weights = ctx.store.open_published(entry["weights"]).files
    checkpoint = ctx.store.open_published(f"runs/tiny/checkpoints/00000001-{entry['attempt']}/").files
    assert sum(name.endswith(".safetensors") for name in weights) >= 2
    assert {name.partition("-model")[0] for name in checkpoint} == {"shard-00001", "shard-00002", "trainer.json"}
    assert not [key for key in ctx.store.list("runs") if "-copy" in key]


def test_a_stop_ends_the_step_on_all_ranks_and_they_stay_usable(story: dict[str, Any]) -> None:
    assert story["stop_s"] < 1.5
    assert story["alive"]


def test_a_killed_rank_is_noticed_at_once_and_the_same_session_goes_on(story: dict[str, Any]) -> None:
    assert story["kill_s"] < 2.0
    assert f"rank 1 of the trainer (process {story['pids'][1]}, signal 9) ended" in story["error"]
    assert "/trainer-0.log" in story["error"]
    assert story["left"] == [], "the other ranks were ended with it"


def test_one_rank_goes_on_with_the_run_of_two(story: dict[str, Any], one_rank: RunContext) -> None:
    """The seal replays step 2 with two ranks, exactly; what it saves is loaded by one."""
    store, record = story["ctx"].store, load_run(story["ctx"].store, "tiny")
    key = "parallelism.data_parallel_shard_degree"
    with pytest.raises(ConfigError, match=f"--allow-config-change {key}"):
        resume_run(store, record, tiny(*COMMON))
    seal(store, record, StopToken())
    checkpoint = f"runs/tiny/checkpoints/00000002-{story['ctx'].ledger.entry(2)['attempt']}/"
    assert any(name.startswith("shard-00002-") for name in store.open_published(checkpoint).files)
    again = opened(RunContext(store, resume_run(store, record, tiny(*COMMON), [key], allow_code=True)))
    again.rollouts.begin(3)
    advance(again, 4)
    assert again.ledger.verify() == 4
    assert_equal_versions(again, one_rank, 4)
    loss = [c.ledger.entry(3)["metrics"]["loss"] for c in (again, one_rank)]
    assert loss[0] == pytest.approx(loss[1], abs=1e-6)


def test_one_rank_in_a_process_of_its_own_makes_the_same_run_bit_by_bit(one_rank: RunContext, tmp_path: Path) -> None:
    """Two steps there, in which it is killed once, and two in the run's own process."""
    ctx = advance(new_run(str(tmp_path), *COMMON, OWN_PROCESS), 1)
    ctx.trainer.free_cached()
    (pid,) = ctx.trainer._trainer._pids.values()
    make_batch(ctx, 1)
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    ctx.trainer.free_cached()  # a dead one has nothing to give back
    train_batch(ctx, 1)
    assert os.getpid() not in ctx.trainer._trainer._pids.values()
    ctx.close()
    OPENED.remove(ctx)
    store, key = ctx.store, "training.own_process"
    again = opened(RunContext(store, resume_run(store, load_run(store, "tiny"), tiny(*COMMON), [key], allow_code=True)))
    again.rollouts.begin(2)
    advance(again, 4)
    for ours, theirs in zip(again.ledger.entries(), one_rank.ledger.entries(), strict=True):
        assert ours["state_digest"] == theirs["state_digest"]
        assert ours["weights_digest"] == theirs["weights_digest"]
        assert [ours["metrics"][name] for name in METRICS] == [theirs["metrics"][name] for name in METRICS]


@pytest.mark.parametrize("overrides", [TWO, (*COMMON, OWN_PROCESS)])
def test_ranks_that_cannot_reach_the_store_are_refused_before_they_start(overrides: tuple[str, ...]) -> None:
    ctx = new_run(memory(), *overrides)
    initialise(ctx)
    with pytest.raises(ConfigError, match=r"store: memory://.*s3://bucket/prefix"):
        ctx.trainer.prepare(0)

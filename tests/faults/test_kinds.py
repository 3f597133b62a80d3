"""``kill -9`` of one process of each kind, and a disk that fills up, under whole runs: what was planned is trained.

Flows that are killed: test_kill_resume.py. Roles that are killed: tests/roles. Here: the servers that a run uses, the
processes that it starts, a spot machine that is taken, a machine whose disk is full and one whose clock is wrong.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.processes import Forge, write_config
from tests.faults.servers import S3, Prefect
from tests.faults.stored import Stored, check_complete, check_same_run
from tests.faults.supervised import Supervised, title
from tests.runs.harness import TINY

pytestmark = [pytest.mark.server, pytest.mark.engine]

STEPS = 10
RANKS: dict[str, Any] = TINY | {
    "steps": STEPS,
    "max_staleness": 1,
    "training": TINY["training"] | {"token_budget": 128},
    "parallelism": {"data_parallel_shard_degree": 2},
    "eval": {"prompts": 0},
}
VLLM: dict[str, Any] = TINY | {
    "steps": 12,
    "max_staleness": 1,
    "model": TINY["model"] | {"hidden_size": 64, "head_dim": 32},
    "generator": {"backend": "vllm", "threads": 1},
    "rollout": TINY["rollout"] | {"version": "newest"},
    "eval": {"prompts": 0},
}
Supervise = Callable[..., Supervised]


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    server = Prefect(tmp_path_factory.mktemp("prefect") / "home")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    before = dict(os.environ)
    server = S3(tmp_path_factory.mktemp("s3") / "data")
    yield server
    server.stop()
    for name in server.environment:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in before.items() if name in server.environment})


@pytest.fixture(scope="module")
def supervise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervise]:
    """``supervise(config, processes, environment, store)``: a run that ends with the module."""
    made: list[Supervised] = []

    def start(*arguments: Any, **keywords: Any) -> Supervised:
        made.append(Supervised(tmp_path_factory.mktemp("run") / "r", *arguments, **keywords))
        return made[-1]

    yield start
    for run in made:
        run.end()


@pytest.fixture(scope="module")
def whole(supervise: Supervise, prefect: Prefect) -> Stored:
    """The run of two ranks that nothing happens to."""
    run = supervise(RANKS, ("flow",), prefect.environment)
    run.finish()
    assert run.starts["flow"] == 1, run.output()
    return Stored(run.uri)


def test_a_run_outlives_its_servers_its_ranks_and_its_machine(
    supervise: Supervise, prefect: Prefect, s3: S3, whole: Stored
) -> None:
    """A rank, the S3 server, SIGTERM and the Prefect server, one after the other, all in one run."""
    run = supervise(RANKS, ("flow",), prefect.environment, store="s3://forge/kinds")
    run.until(lambda steps: steps >= 1)
    kills = [run.kill("trainer rank"), run.kill("s3 server", s3)]
    flow = run.running["flow"]
    flow.signal_group(signal.SIGTERM)
    assert flow.wait(30) == 130, flow.output
    committed = run.look()
    run.until(lambda steps: steps > committed)
    starts = run.starts["flow"]
    kills.append(run.kill("prefect server", prefect))
    run.finish()
    print(kills, run.starts)
    assert run.starts["flow"] == starts, "it goes on without the Prefect server"
    check_same_run(Stored(run.uri), whole, STEPS)
    check_complete(Stored(run.uri), STEPS, 1)


def test_a_run_goes_on_when_its_engine_is_killed(supervise: Supervise, prefect: Prefect) -> None:
    """vLLM, which samples the next batch while the trainer works. (50 s: two starts of vLLM)"""
    run = supervise(VLLM, ("flow",), prefect.environment)
    run.until(lambda steps: steps >= 1)
    print(run.kill("vllm engine"))
    run.finish()
    assert run.starts["flow"] == 1, run.output()
    check_complete(Stored(run.uri), VLLM["steps"], 1)
    assert max(entry["max_age"] for entry in Stored(run.uri).ledger.entries()) == 1, "batches overlapped"


def test_a_run_that_loses_its_own_server_finishes_and_ends(tmp_path: Path) -> None:
    """Without retries of Prefect's client, which take a minute for each of the two states that end a flow."""
    config = write_config(tmp_path, TINY | {"steps": STEPS, "max_staleness": 1, "eval": {"prompts": 0}})
    flow = Forge(tmp_path, "train", config, own_server=True, environment={"PREFECT_CLIENT_MAX_RETRIES": "0"})
    try:
        flow.wait_until(lambda: flow.printed(r"step 2/"))
        (server,) = [p for p in psutil.Process(flow.process.pid).children() if "server_process" in title(p)]
        server.kill()
        flow.wait_until(lambda: flow.printed(rf"step {STEPS}/{STEPS}"))
        assert flow.wait(45) == 0, flow.output  # events in Prefect's queue are not tried one by one, 7 s each
        assert "run tiny is complete in the store" in flow.output
        assert flow.orphans() == []
    finally:
        flow.end()
    check_complete(Stored(tmp_path / "store"), STEPS, 1)


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec -= 86400;
    return failed;
}
"""


@pytest.fixture
def a_day_behind(tmp_path: Path) -> dict[str, str]:
    """The environment of processes whose clock is a day behind that of this machine."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("a clock of its own for a process needs Linux and a C compiler")
    (tmp_path / "clock.c").write_text(CLOCK)
    library = str(tmp_path / "clock.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    environment = {"LD_PRELOAD": library}
    now = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"], env=environment, stdout=-1, check=True
    )
    assert float(now.stdout) < time.time() - 80_000
    return environment


def fill(folder: Path) -> Path:
    """Write a file until nothing more fits."""
    with (folder / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    return folder / "ballast"


def test_a_run_on_a_full_disk_says_so_and_goes_on_once_there_is_room(
    supervise: Supervise,
    prefect: Prefect,
    whole: Stored,
    small_disk: Callable[[int], Path],
    a_day_behind: dict[str, str],
) -> None:
    """Once there is room again it goes on, on a machine whose clock is a day behind the one that began it."""
    disk = small_disk(24)
    run = supervise(RANKS, ("flow",), prefect.environment, store=str(disk / "store"))
    run.until(lambda steps: steps >= 2)
    ballast, flow = fill(disk), run.running["flow"]
    assert flow.wait() == 1, flow.output
    assert "No space left on device" in flow.output
    assert "forge resume tiny" in flow.output
    assert Stored(run.uri).ledger.verify() < STEPS
    ballast.unlink()
    run.environment |= a_day_behind
    run.finish()
    assert run.starts["flow"] == 2, run.output()
    check_same_run(Stored(run.uri), whole, STEPS)
    check_complete(Stored(run.uri), STEPS, 1)
    first, last = (entry["finished_at"] for entry in (Stored(run.uri).ledger.entries()[i] for i in (0, -1)))
    assert last < first, "the clocks differed"

"""A supervised run that was interrupted anywhere ends as the one that was not, bit for bit on a CPU."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from forge_core.data.errors import DataError
from forge_core.runs.initialise import initialise
from forge_core.runs.record import load_run
from forge_core.runs.sft import train_rows
from forge_core.runs.sft_context import SftContext
from forge_core.runs.training import LostRace
from forge_core.stop import Stopped
from forge_core.store import layout, open_store
from tests.sft.harness import advance, decided, memory, new_run, opened, reopened, write_data

pytestmark = pytest.mark.engine


def weights(ctx: SftContext, version: int) -> dict[str, str]:
    files = ctx.store.open_published(ctx.ledger.weights_prefix(version)).manifest.files
    return {file.name: file.sha256 for file in files if file.name.endswith(".safetensors")}


def checkpoints(ctx: SftContext) -> list[str]:
    return ctx.store.folders(f"{layout.run(ctx.run_id)}checkpoints")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_run_that_another_process_goes_on_with_equals_the_uninterrupted_one(data: Path, at: int):
    whole = advance(new_run(memory(), data), 4)
    begun = advance(new_run(memory(), data), at)
    assert len(checkpoints(begun)) == at // 2  # every second step has one: from 1 and 3 on, a step is replayed
    ended = advance(reopened(begun), 4)
    assert decided(ended) == decided(whole)
    assert weights(ended, 4) == weights(whole, 4)


@contextmanager
def advancing(store: str, data: Path) -> Iterator[Callable[[], tuple[int, Callable[[], int]]]]:
    """``start()`` starts a process that goes on with the run: its id, and what waits for its exit status."""
    command = [sys.executable, "-m", "tests.sft.advancing", store, str(data)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin
        assert parent.stdout

        def start() -> tuple[int, Callable[[], int]]:
            print("", file=parent.stdin, flush=True)
            return int(parent.stdout.readline()), lambda: int(parent.stdout.readline())

        yield start
        parent.stdin.close()


def test_kills_at_any_moment_leave_a_run_that_ends_like_the_uninterrupted_one(data: Path, tmp_path: Path):
    whole = advance(new_run(memory(), data), 4)
    draw, store = random.Random(7), f"file://{tmp_path}/store"
    run_json = tmp_path / "store" / layout.run_json("tiny-sft")
    with advancing(store, data) as start:
        for _ in range(3):
            pid, ended_with = start()
            while not run_json.exists():
                time.sleep(0.01)
            time.sleep(draw.uniform(0.0, 3.0))
            with suppress(ProcessLookupError):  # it was finished sooner
                os.kill(pid, signal.SIGKILL)
            assert ended_with() in (-signal.SIGKILL, 0)
        assert start()[1]() == 0
    ended = opened(SftContext(open_store(store), load_run(open_store(store), "tiny-sft")))
    assert decided(ended) == decided(whole)
    assert ended.ledger.verify() == 4


def test_a_stop_in_the_middle_of_a_step_commits_nothing_and_costs_nothing(data: Path):
    settings = ("training.sync_interval=100", "steps=1")
    whole = advance(new_run(memory(), data, *settings), 1)
    ctx = new_run(memory(), data, *settings)
    initialise(ctx)
    ctx.trainer.prepare(0)
    threading.Timer(0.3, lambda: ctx.stop.set("test")).start()
    with pytest.raises(Stopped):
        train_rows(ctx, 0)
    assert ctx.ledger.head() == 0
    assert decided(advance(reopened(ctx), 1)) == decided(whole)


def test_a_step_that_is_asked_for_twice_is_taken_once(data: Path):
    ctx = advance(new_run(memory(), data), 1)
    assert train_rows(ctx, 0) == ctx.ledger.entry(0)
    assert ctx.ledger.head() == 1


def test_of_two_trainers_one_wins_and_the_other_says_why(data: Path):
    one = advance(new_run(memory(), data), 1)
    other = reopened(one)
    other.trainer.prepare(1)
    advance(one, 2)
    other.ledger.entry = lambda batch: None if batch == 1 else one.ledger.entry(batch)  # it looked before the commit
    with pytest.raises(LostRace, match="one trainer per run"):
        train_rows(other, 1)


def test_changed_data_are_refused_by_name(data: Path, tmp_path: Path):
    mine = write_data(tmp_path / "mine.jsonl")
    begun = advance(new_run(memory(), mine), 1)
    write_data(mine, seed=2)
    with pytest.raises(DataError, match=r"dataset.*mine"):
        advance(reopened(begun), 2)


def test_more_steps_follow_on_with_the_rows_that_come_next(data: Path):
    short = advance(new_run(memory(), data, "steps=2"), 2)
    longer = advance(new_run(memory(), data), 3)
    assert short.ledger.required(1)["cursor"] == longer.ledger.required(1)["cursor"]
    assert longer.ledger.required(2)["cursor"] != longer.ledger.required(1)["cursor"]

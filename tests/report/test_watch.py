"""Watching a run from its store: what is said of it, how few requests that takes, and when it ends."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flows import watching
from flows.cli import main
from flows.stopping import request_stop
from flows.watching import sparkline
from forge_core.config import load_config
from forge_core.config.sft_loader import load_sft_config
from forge_core.report.facts import collect
from forge_core.report.watching import Watched
from forge_core.runs.failures import record_failure
from forge_core.runs.heartbeat import Heartbeat
from forge_core.runs.liveness import run_state
from forge_core.runs.record import RunRecord, create_run, load_run
from forge_core.runs.rescored import finished_batches
from forge_core.runs.versions import VALIDATION
from forge_core.stop import Stopped
from forge_core.store import Store, layout, open_store
from forge_core.store.memory import MemoryBackend
from tests.query.example import RUN, example_run

NEW = {"run": {"id": "new"}, "steps": 5, "rewards": {"functions": [{"path": "exact_match"}]}}


class Counting(MemoryBackend):
    """Counts what is asked of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("read", "exists", "list", "folders", "now", "written_at"):
            super().__getattribute__("asked")[name] += 1
        return super().__getattribute__(name)


class Clock:
    """That of the store, which a test turns."""

    def __init__(self, backend: Counting) -> None:
        self.now = 0.0
        backend.clock = lambda: self.now


@pytest.fixture
def backend() -> Counting:
    return Counting(os.urandom(8).hex())


@pytest.fixture
def store(backend: Counting) -> Store:
    return example_run(Store(backend))


def shown(capsys: pytest.CaptureFixture[str], watched: Watched) -> str:
    watching.show_once(watched)
    return capsys.readouterr().out


def test_a_finished_run_shows_its_rewards_and_what_each_role_made(store: Store, capsys: pytest.CaptureFixture[str]):
    lines = shown(capsys, Watched(store, RUN)).splitlines()
    assert lines[0].split("  ")[:2] == [RUN, "step 3 of 3, finished"]
    assert lines[1].split() == ["reward/mean", "▁▂█", "0.391"]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|")]
    made = {row[1]: row[2] for row in rows if len(row) > 3}
    assert made | {"generator": "batch 2", "scorer": "batch 2", "trainer": "version 3"} == made


def test_a_run_that_goes_on_shows_open_shards_processes_stops_and_its_last_error(
    store: Store, capsys: pytest.CaptureFixture[str]
):
    for key in (layout.ledger(RUN, 2), *store.list(f"{layout.run(RUN)}rewards/{layout.number(2)}/00000000-00000001")):
        store.delete(key)
    record_failure(store, RUN, "scorer", ValueError("first"))
    time.sleep(0.01)  # times are told in milliseconds
    record_failure(store, RUN, "trainer", RuntimeError("the disk is full"))
    request_stop(store, RUN)
    with Heartbeat(store, RUN, "generator", "generator-1", every_s=0.05) as beat:
        beat.doing("batch 3, shard 0")
        beat.made()
        time.sleep(0.2)
        text = shown(capsys, Watched(store, RUN))
    assert "step 2 of 3, working, 1 stop request\n" in text
    assert "batch 2: 2" in text
    assert "batch 2: 1" in text
    assert "batch 3, shard 0" in text
    assert "the disk is full" in text


def test_requests_to_stop_are_of_the_past_when_something_was_made_after_them(backend: Counting):
    clock = Clock(backend)
    store = example_run(Store(backend))
    last = store.read(layout.ledger(RUN, 2))
    store.delete(layout.ledger(RUN, 2))
    clock.now += 5.0
    request_stop(store, RUN)
    watched = Watched(store, RUN)
    assert (watched.look().stops, watched.look().silent_s) == (1, None)
    clock.now += 5.0
    rewards = f"{layout.rewards(RUN, 2, 0, 1)}manifest.json"
    store._backend.write(rewards, store.read(rewards))  # what was under way
    assert Watched(store, RUN).look().stops == 1
    clock.now += 3600.0
    store._backend.write(rewards, store.read(rewards))  # a resumed run
    clock.now += 9.0
    state = Watched(store, RUN).look()
    assert (state.stops, state.silent_s) == (0, 9.0)
    request_stop(store, RUN)
    store.put_new(layout.ledger(RUN, 2), last)
    assert Watched(store, RUN).look().finished


class Killed(BaseException):
    """A process that dies without a word: nothing is written any more."""


def state(store: Store, record: RunRecord) -> str:
    return run_state(store, record, finished_batches(store, record))


def beating(store: Store, ending: BaseException | None = None, every_s: float = 0.05) -> None:
    """A process that works on the run and ends."""
    beat = Heartbeat(store, RUN, "run", "run", every_s=every_s)
    beat.__enter__()
    time.sleep(0.1)
    if isinstance(ending, Killed):
        beat._beat = lambda **_: None  # type: ignore[method-assign]
    beat.__exit__(type(ending) if ending else None, ending, None)


@pytest.mark.parametrize(
    ("ending", "word"),
    [(None, "stopped"), (Stopped("forge stop"), "stopped"), (KeyboardInterrupt(), "stopped"),
     (RuntimeError("out of memory"), "failed"), (Killed(), "killed: no sign of life for 1:00")],
)  # fmt: skip
def test_how_the_process_ended_that_was_there_last_is_seen_at_the_first_look(
    backend: Counting, ending: BaseException | None, word: str, capsys: pytest.CaptureFixture[str]
):
    clock = Clock(backend)
    store = example_run(Store(backend))
    store.delete(layout.ledger(RUN, 2))
    beating(store, ending)
    clock.now += 60.0
    assert f"step 2 of 3, {word}\n" in shown(capsys, Watched(store, RUN))
    facts = collect(store, RUN)
    assert facts.state == word.partition(":")[0]
    assert state(store, load_run(store, RUN)) == facts.state


def test_a_process_works_as_long_as_it_gives_a_sign_in_its_own_time(backend: Counting):
    clock = Clock(backend)
    store = example_run(Store(backend))
    store.delete(layout.ledger(RUN, 2))
    record = load_run(store, RUN)
    assert state(store, record) == "idle", "a run of before there were signs of life"
    beating(store, Killed(), every_s=0.05)
    clock.now += 44.0
    assert state(store, record) == "working"
    clock.now += 2.0
    assert state(store, record) == "killed"
    store.put_json(layout.worker(RUN, "slow"), {**store.read_json(layout.worker(RUN, "run")), "every_s": 100.0})
    clock.now += 290.0
    assert state(store, record) == "working"
    assert [worker.silent for worker in Watched(store, RUN).look().workers] == [True, False]


def test_a_run_that_is_created_and_one_that_is_finished_need_no_sign_of_life(store: Store):
    record = create_run(store, load_config(NEW))
    assert state(store, record) == "created"
    assert state(store, load_run(store, RUN)) == "finished"


def test_a_look_at_a_supervised_run_with_patience_reads_no_entry_again(backend: Counting):
    store = Store(backend)
    config = {
        "run": {"id": "fine"},
        "steps": 100,
        "dataset": {"path": "x", "holdout": 0.1},
        "validation": {"patience": 50},
    }
    create_run(store, load_sft_config(config))
    store.put_new_json(layout.ledger_init("fine"), {"version": 0})
    for batch in range(30):
        store.put_new_json(layout.ledger("fine", batch), {"batch": batch, "metrics": {VALIDATION: 1.0}})
    watched = Watched(store, "fine")
    watched.silence()
    before = backend.asked["read"]
    watched.silence()
    assert backend.asked["read"] == before


def test_what_a_role_made_last_is_the_newest_by_time(backend: Counting):
    clock = Clock(backend)
    store = example_run(Store(backend))
    for batch, shard, at in ((0, 1, 10.0), (2, 0, 30.0), (1, 1, 40.0)):
        clock.now = at
        key = f"{layout.episodes(RUN, batch, 0, shard)}manifest.json"
        store._backend.write(key, store.read(key))
    store.delete(layout.ledger(RUN, 2))  # the batches 1 and 2 are looked at
    clock.now = 45.0
    (generator,) = [role for role in Watched(store, RUN).look().roles if role.name == "generator"]
    assert (generator.newest, generator.age_s) == ("batch 1", 5.0)


def test_a_run_without_a_version_is_shown(store: Store, capsys: pytest.CaptureFixture[str]):
    create_run(store, load_config(NEW))
    text = shown(capsys, Watched(store, "new"))
    assert "no version yet" in text
    assert "none yet" in text


def test_a_second_look_costs_a_handful_of_requests(backend: Counting, store: Store):
    create_run(store, load_config({**NEW, "run": {"id": "other"}}))
    watched = Watched(store, RUN)
    watched.look()
    backend.asked.clear()
    watched.look()
    assert sum(backend.asked.values()) <= 12, backend.asked
    assert backend.asked["read"] == 0


def test_watching_ends_when_the_run_does(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watching, "LOOK_S", 0.02)
    last = store.read(layout.ledger(RUN, 2))
    store.delete(layout.ledger(RUN, 2))
    thread = threading.Thread(target=watching.follow, args=(Watched(store, RUN),))
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    store.put_new(layout.ledger(RUN, 2), last)
    thread.join(10)
    assert not thread.is_alive()
    text = capsys.readouterr().out
    assert text.count("step 2 of 3") == 1, "a screen is printed when something changed"
    assert "step 3 of 3, finished" in text


def test_a_store_that_does_not_answer_is_said_and_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watching, "LOOK_S", 0.02)
    store = example_run(open_store(str(tmp_path / "store")))
    watched = Watched(store, RUN)
    entry = tmp_path / "store" / layout.ledger(RUN, 2)
    body = entry.read_bytes()
    entry.write_bytes(b"{")
    thread = threading.Thread(target=watching.follow, args=(watched,))
    thread.start()
    time.sleep(0.2)
    entry.write_bytes(body)
    thread.join(10)
    text = capsys.readouterr().out
    assert "the store does not answer" in text
    assert "step 3 of 3, finished" in text


def test_a_sparkline_goes_from_the_lowest_to_the_highest():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"


@pytest.mark.server
def test_the_command_over_s3(s3_store_uri: str, capsys: pytest.CaptureFixture[str]):
    example_run(open_store(f"{s3_store_uri}-watch"))
    assert main(["watch", RUN, "--store", f"{s3_store_uri}-watch"]) == 0
    assert "step 3 of 3, finished" in capsys.readouterr().out

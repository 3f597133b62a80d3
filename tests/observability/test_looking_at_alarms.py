"""Who looks at a run from elsewhere (``forge watch``, ``forge report``, the coordinator, the next resume) sees the
alarms that the run itself raises, and what looking costs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.alarming import Alarming
from forge_core.config import ConfigError, load_config
from forge_core.config.alarm_sections import SftAlarmSection
from forge_core.config.sft_loader import load_sft_config
from forge_core.observability.alarms import STORED, alarms_of
from forge_core.report.alarms import alarms
from forge_core.report.facts import collect
from forge_core.report.watching import Watched
from forge_core.runs.context import RunContext
from forge_core.runs.record import create_run, load_run, resume_check, resume_run
from forge_core.runs.redo_setup import check_changes
from forge_core.store import Ledger, Store, layout, open_store
from forge_core.store.memory import MemoryBackend
from tests.observability.test_alarms import START, falling_and_rising, steps, stored
from tests.store.entries import RUN, init_entry

SFT = Path(__file__).parents[2] / "configs" / "sft_quickstart.yaml"


class Recording(MemoryBackend):
    """Notes the keys that are read, and holds up who counts or lists everything until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(f"looking-{os.urandom(6).hex()}")
        self.keys: list[str] = []
        self.go_on = threading.Event()

    def read(self, path: str) -> bytes:
        self.keys.append(path)
        return super().read(path)

    def list(self, folder: str) -> dict[str, int]:
        if not folder:
            assert self.go_on.wait(20)
        return super().list(folder)


def names(found: list[Any]) -> list[tuple[str, int]]:
    return [(alarm.name, alarm.step) for alarm in found]


def reported(store: Store) -> list[tuple[str, int]]:
    return names(alarms(collect(store, RUN)))


def watched(store: Store) -> list[tuple[str, int]]:
    return names([alarm for alarm in Watched(store, RUN).look().alarms if alarm.name != "silent"])


# Thresholds ---------------------------------------------------------------------------------------------------------


def test_thresholds_of_a_resume_hold_for_whoever_looks_and_for_the_next_resume():
    store = stored(steps(10, kl=0.7), silent_minutes=None)
    open_since_then = Watched(store, RUN)
    assert names(open_since_then.look().alarms) == watched(store) == reported(store) == []
    record = load_run(store, RUN)
    config = load_config(record.config, ["alarms.kl=0.5"])
    assert resume_check(store, record, config)[0] == [], "no checkpoint is made for it"
    resumed = resume_run(store, record, config)
    assert (resumed.config.alarms.kl, resumed.changes) == (0.5, 1)
    assert store.read_json(layout.config_change(RUN, 0))["changed"] == ["alarms.kl"]
    again = load_run(store, RUN)
    assert again.config == resumed.config
    assert resume_run(store, again, load_config(again.config)).changes == 1, "nothing changed"
    assert names(open_since_then.look().alarms) == watched(store) == reported(store) == [("kl", 3)]


def test_where_a_run_is_shown_is_chosen_again_by_each_resume():
    store = stored(steps(2))
    record = load_run(store, RUN)
    resumed = resume_run(store, record, load_config(record.config, ["metric_logging.jsonl.folder=elsewhere"]))
    assert resumed.config.metric_logging.jsonl is not None
    assert (resumed.changes, load_run(store, RUN).config) == (0, record.config)


def test_a_run_that_trains_from_stored_episodes_may_have_thresholds_of_its_own():
    config = load_run(stored(steps(1)), RUN).config
    other = load_config(config, ["alarms.kl=0.5"])
    check_changes(config, other, "retrain-from")
    with pytest.raises(ConfigError, match=r"alarms\.kl"):
        check_changes(config, other, "rescore")


# Steps --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [4, 90, 103, 150, 165, 180, 313, 360])
def test_watching_shows_of_a_rising_loss_what_the_run_raised(head: int):
    store = open_store(f"memory://looking-{os.urandom(6).hex()}")
    given = ["run.id=" + RUN, "steps=999", "alarms.silent_minutes=null"]
    create_run(store, load_sft_config(SFT, given))
    ledger = Ledger(store, RUN)
    ledger.commit_init(init_entry())
    entries = steps(head, loss=falling_and_rising)
    for one in entries:
        ledger.commit({**one, "previous": ledger.previous(one["batch"])})
    raised = names(alarms_of(SftAlarmSection(), entries))
    assert watched(store) == [(name, step) for name, step in raised if step > head - 60]
    assert reported(store) == raised


# Silence ------------------------------------------------------------------------------------------------------------


def long_step(store: Store, made: dict[int, float]) -> tuple[bool, bool]:
    """Whether a run whose third step takes 50 minutes is silent for the one who watches at its end, and for the report
    afterwards. ``made``: when a shard of a batch was stored, in minutes since the first step."""
    clock = [START.timestamp()]
    store._backend.clock = lambda: clock[0]  # type: ignore[attr-defined]
    for key in store.list(""):
        store._backend.write(key, store.read(key))  # by that clock
    for batch, minute in made.items():
        clock[0] = START.timestamp() + 60.0 * minute
        at = {"finished_at_s": clock[0]}
        store.publish(layout.episodes(RUN, batch, 0, 0), {"x.parquet": b"x"}, request="x", provenance=at)
    clock[0] = START.timestamp() + 60.0 * 50
    (live,) = [[alarm.name for alarm in Watched(store, RUN).look().alarms]]
    ledger = Ledger(store, RUN)
    (last,) = steps(1, 2)
    ledger.commit({**last, "previous": ledger.previous(2), "finished_at": "2026-01-01T00:50:00+00:00"})
    return "silent" in live, "silent" in [name for name, _ in reported(store)]


@pytest.mark.parametrize(
    ("staleness", "made", "silent"),
    [
        (5, {7: 30.0}, False),  # the last batch that may be begun; those before it are not there yet
        (5, {3: 10.0, 6: 35.0}, False),
        (2, {2: 30.0}, False),
        (5, {8: 30.0}, True),  # nobody may begin it
        (1, {2: 1.5, 3: 1.6, 4: 30.0}, True),
        (5, {7: 10.0}, True),
    ],
)
def test_a_long_step_is_silent_when_no_batch_that_may_be_open_has_anything_new(
    staleness: int, made: dict[int, float], silent: bool
):
    assert long_step(stored(steps(2), max_staleness=staleness), made) == (silent, silent)


@pytest.fixture
def backend() -> Iterator[Recording]:
    made = Recording()
    yield made
    made.go_on.set()


def run_in(backend: Recording, committed: int, **thresholds: Any) -> RunContext:
    store = Store(backend)
    given = {"run": {"id": RUN}, "steps": 500, "alarms": thresholds}
    record = create_run(store, load_config({**given, "rewards": {"functions": [{"path": "exact_match"}]}}))
    ledger = Ledger(store, RUN)
    ledger.commit_init(init_entry())
    for one in steps(committed):
        ledger.commit({**one, "previous": ledger.previous(one["batch"])})
    return RunContext(store, record)


def test_who_watches_for_silence_reads_no_entries_and_forgets_closed_batches(backend: Recording):
    ctx = run_in(backend, 80)
    watch = Watched(ctx.store, RUN)
    for one in steps(40, 80):
        for batch in (one["batch"], one["batch"] + 1):
            ctx.store.publish(layout.episodes(RUN, batch, 0, 0), {"x": b"x"}, request="x")
        backend.keys.clear()
        version, age_s = watch.silence()
        assert not [key for key in backend.keys if "/ledger/" in key]
        assert (version, age_s is not None and age_s < 5.0) == (one["batch"], True)
        ctx.ledger.commit({**one, "previous": ctx.ledger.previous(one["batch"])})
    assert len(watch._written) < 10
    assert watch.look().silent_s == pytest.approx(watch.silence()[1], abs=1.0)


def test_a_process_that_waits_looks_at_the_age_of_the_newest_object_alone(backend: Recording):
    ctx = run_in(backend, 80, silent_minutes=0.02)
    told: list[str] = []
    alarming = Alarming(ctx, told.append)
    alarming._events.close(1.0)  # no server here
    backend.keys.clear()
    alarming.watch_silence()
    deadline = time.monotonic() + 10.0
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
    alarming.close()
    assert told == ["alarm after step 80: no new object for 0 minutes, limit 0.02 minutes"]
    assert not [key for key in backend.keys if "/ledger/" in key]


# Room ---------------------------------------------------------------------------------------------------------------


def test_a_bucket_that_takes_long_to_count_holds_up_nothing_else(backend: Recording):
    ctx = run_in(backend, 1, bucket_gib=1.0)
    assert ctx.space.measured() == {}
    done = threading.Event()
    assert ctx.background.submit(done.set)
    assert done.wait(5.0), "what deletes garbage waits for the count"
    backend.go_on.set()
    deadline = time.monotonic() + 10.0
    while not ctx.space.measured() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ctx.space.measured() == {STORED: float(sum(ctx.store.sizes("").values()))}

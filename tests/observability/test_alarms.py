"""Which steps raise an alarm, which do not, and that looking again at the store finds the same."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows import watching
from flows.stopping import request_stop
from forge_core.config import ConfigError, load_config
from forge_core.config.alarm_sections import AlarmSection, AnyAlarms, SftAlarmSection
from forge_core.observability.alarms import (
    FREE,
    GIB,
    STORED,
    WEIGHTS,
    Alarms,
    alarm_section,
    alarms_of,
    first_trained,
    longest_gap,
)
from forge_core.report import write_report
from forge_core.report.alarms import alarms
from forge_core.report.facts import collect
from forge_core.report.watching import Watched
from forge_core.runs.record import create_run
from forge_core.runs.space import Space
from forge_core.store import Ledger, Store, layout, open_store
from tests.store.entries import RUN, entry, init_entry

START = datetime(2026, 1, 1, tzinfo=UTC)
QUIET = {"reward/std": 0.3, "entropy": 0.5, "kl": 0.01, "mismatch/one_version_mean_abs_logprob": 0.02, "loss": 0.1}
NONE = {"planned": 8, "trained": 0, "dropped": {"zero_variance": 8}}


def steps(n: int, first: int = 0, /, **metrics: Any) -> list[dict[str, Any]]:
    """Entries of a run that learns; a metric may be a function of the step."""
    made = []
    for batch in range(first, first + n):
        values = {**QUIET, "reward/mean": 0.01 * batch, **metrics}
        values = {k: v(batch) if callable(v) else v for k, v in values.items()}
        at = (START + timedelta(minutes=batch)).isoformat()
        made.append(entry(batch, "", metrics=values, started_at=at, finished_at=at))
    return made


def raised(section: AnyAlarms, entries: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(alarm.name, alarm.step) for alarm in alarms_of(section, entries)]


def key(name: str) -> str:
    return "mismatch/one_version_mean_abs_logprob" if name == "mismatch" else name


def test_a_run_that_learns_raises_nothing():
    assert raised(AlarmSection(), steps(400)) == []


def test_a_reward_that_does_not_rise_is_flat_once_the_window_is_full():
    (alarm,) = alarms_of(AlarmSection(), steps(300, **{"reward/mean": lambda b: 0.4 + 0.01 * (b % 3)}))
    assert (alarm.name, alarm.step, alarm.at) == ("flat_reward", 100, (START + timedelta(minutes=99)).isoformat())
    assert alarm.limit == pytest.approx(0.1 * 0.3)
    assert "0.410 in the newest 50 steps" in alarm.message


@pytest.mark.parametrize(("rise", "flat"), [(0.029, True), (0.031, False)])
def test_how_much_a_reward_must_rise_is_a_share_of_its_spread(rise: float, flat: bool):
    found = raised(AlarmSection(flat_reward=10), steps(10, **{"reward/mean": lambda b: rise * (b >= 5)}))
    assert found == ([("flat_reward", 10)] if flat else [])


def test_a_falling_reward_and_one_that_is_always_the_same_are_flat():
    for reward in (lambda b: -0.1 * b, 0.0, 1.0):
        found = raised(AlarmSection(flat_reward=20), steps(20, **{"reward/mean": reward, "reward/std": 0.0}))
        assert found == [("flat_reward", 20)]


def test_the_entropy_has_collapsed_against_the_first_steps():
    (alarm,) = alarms_of(AlarmSection(), steps(30, entropy=lambda b: 0.5 if b < 10 else 0.0099))
    assert (alarm.name, alarm.step) == ("entropy_collapse", 13)
    assert (alarm.value, alarm.limit) == (0.0099, 0.01)
    assert raised(AlarmSection(), steps(30, entropy=lambda b: 0.5 if b < 10 else 0.0101)) == []


@pytest.mark.parametrize("name", ["kl", "mismatch"])
def test_a_blow_up_takes_three_steps_in_a_row(name: str):
    assert raised(AlarmSection(), steps(20, **{key(name): lambda b: 1.1 if b in (5, 6, 8, 9) else 0.1})) == []
    assert raised(AlarmSection(), steps(20, **{key(name): lambda b: 1.1 if b >= 5 else 0.1})) == [(name, 8)]


def test_steps_that_trained_nothing_say_nothing_of_the_policy():
    entries = steps(30)
    for idle in entries[10:20]:
        idle["episodes"], idle["metrics"]["entropy"] = NONE, 0.0
    assert raised(AlarmSection(), entries) == []


def test_an_alarm_that_goes_on_is_raised_once_and_again_after_a_rest():
    blow_up = lambda until: lambda b: 2.0 if b < until or b >= 60 else 0.1
    assert raised(AlarmSection(), steps(80, kl=blow_up(35))) == [("kl", 3), ("kl", 63)]
    assert raised(AlarmSection(), steps(80, kl=blow_up(50))) == [("kl", 3)]


@pytest.mark.parametrize("name", ["flat_reward", "entropy", "kl", "mismatch"])
def test_null_switches_one_alarm_off(name: str):
    bad = steps(
        150, **{"reward/mean": 0.0, "kl": 9.0, key("mismatch"): 9.0, "entropy": lambda b: 1.0 if b < 9 else 0.0}
    )
    names = {"entropy": "entropy_collapse"}
    every = {found for found, _ in raised(AlarmSection(), bad)}
    assert every == {"flat_reward", "entropy_collapse", "kl", "mismatch"}
    assert {found for found, _ in raised(AlarmSection(**{name: None}), bad)} == every - {names.get(name, name)}


def test_a_supervised_run_has_an_alarm_for_a_rising_loss():
    assert raised(SftAlarmSection(), steps(40, loss=lambda b: max(1.0, 3.0 - 0.1 * b))) == []
    (alarm,) = alarms_of(SftAlarmSection(), steps(40, loss=lambda b: 1.0 if b < 20 else 1.6))
    assert (alarm.name, alarm.step, alarm.limit) == ("loss_rise", 23, 1.5)
    assert raised(SftAlarmSection(loss_rise=None), steps(40, loss=lambda b: 1.0 if b < 20 else 1.6)) == []


def test_a_loss_rises_from_the_lowest_of_the_newest_hundred_steps():
    late = lambda at: raised(SftAlarmSection(), steps(at + 3, loss=lambda b: 1.0 if b < 1 else 1.6 if b >= at else 1.2))
    assert late(97) == [("loss_rise", 100)]
    assert late(98) == []


@pytest.mark.parametrize("section", [AlarmSection(), SftAlarmSection()])
def test_a_disk_is_nearly_full_when_few_versions_have_room(section: AnyAlarms):
    free = lambda b: (20 - b) * GIB
    (alarm,) = alarms_of(section, steps(15, **{FREE: free, WEIGHTS: 1.0 * GIB}))
    assert (alarm.name, alarm.step) == ("disk_full", 12)
    assert "9 GiB are free" in alarm.message
    assert raised(section, steps(15, **{FREE: free, WEIGHTS: 1.0 * 2**20})) == []
    assert raised(section.model_copy(update={"disk_versions": None}), steps(15, **{FREE: free, WEIGHTS: GIB})) == []


def test_a_bucket_is_nearly_full_at_the_size_that_its_owner_states():
    full = steps(5, **{STORED: lambda b: (b + 97) * GIB})
    assert raised(AlarmSection(bucket_gib=100), full) == [("bucket_full", 4)]
    assert raised(AlarmSection(), full) == []


def falling_and_rising(batch: int) -> float:
    """A loss: its lowest at first, a rise from there, and a second one from a higher floor."""
    if batch < 100:
        return 0.5 if batch == 50 else 0.75
    return 1.1 if batch < 160 else 1.0 if batch < 310 else 1.6


@pytest.mark.parametrize(
    ("section", "names"), [(AlarmSection(), {"flat_reward", "kl"}), (SftAlarmSection(), {"loss_rise"})]
)
def test_going_on_with_a_run_raises_what_going_through_raises(section: AnyAlarms, names: set[str]):
    entries = steps(
        400,
        **{"reward/mean": lambda b: min(0.002 * b, 0.5), "kl": lambda b: 2.0 if 330 < b < 390 else 0.1},
        loss=falling_and_rising,
    )
    whole = alarms_of(section, entries)
    assert {alarm.name for alarm in whole} == names
    for head in (0, 3, 7, 101, 130, 170, 220, 300, 310, 332, 345, 399):
        rules = Alarms(section)
        going_on(rules, entries, head)
        assert [a for one in entries[head:] for a in rules.after(one)] == [a for a in whole if a.step > head]


def going_on(rules: Alarms, entries: list[dict[str, Any]], head: int) -> None:
    """Feed what those who go on with a run of ``head`` steps read of it."""
    newest = max(0, head - rules.needs)
    for one in [*first_trained(entries.__getitem__, newest), *entries[newest:head]]:
        rules.after(one)


def test_the_first_steps_are_those_that_trained_also_of_a_run_that_goes_on():
    entries = steps(124, entropy=lambda b: 2.0 if b < 60 else 0.5 if b < 120 else 0.019)
    for idle in entries[:4]:
        idle["episodes"], idle["metrics"]["entropy"] = NONE, 0.0
    section = AlarmSection(flat_reward=None)
    rules = Alarms(section)
    going_on(rules, entries, 119)
    found = [a for one in entries[119:] for a in rules.after(one)]
    assert [(alarm.name, alarm.step) for alarm in found] == raised(section, entries) == [("entropy_collapse", 123)]


def test_steps_before_a_gap_do_not_count_as_steps_in_a_row():
    flat = {"reward/mean": 0.5, "kl": 2.0}
    assert raised(AlarmSection(kl=None), [*steps(60, **flat), *steps(99, 300, **flat)]) == []
    assert raised(AlarmSection(flat_reward=None), [*steps(2, **flat), *steps(2, 300, **flat)]) == []
    assert raised(AlarmSection(), [*steps(60, kl=0.1), *steps(100, 300, **flat)]) == [("kl", 303), ("flat_reward", 400)]


def seconds_of(section: AnyAlarms, entries: list[dict[str, Any]]) -> float:
    rules, started = Alarms(section), time.perf_counter()
    for one in entries:
        rules.after(one)
    return time.perf_counter() - started


def test_a_step_costs_microseconds():
    entries = steps(500)
    for section in (AlarmSection(), SftAlarmSection()):
        assert min(seconds_of(section, entries) for _ in range(7)) / len(entries) < 3e-4


def test_thresholds_that_mean_nothing_are_refused():
    for wrong in ("alarms.kl=0", "alarms.entropy=1.5", "alarms.flat_reward=2", "alarms.silent_minutes=-1"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            load_config({"alarms": {}}, [wrong])
    assert alarm_section({}, supervised=False) == AlarmSection()  # a run from before there were alarms


# From the store -----------------------------------------------------------------------------------------------------


def stored(entries: list[dict[str, Any]], wanted_steps: int = 500, max_staleness: int = 0, **thresholds: Any) -> Store:
    """A store with a run of these entries."""
    store = open_store(f"memory://alarms-{os.urandom(6).hex()}")
    given = {"run": {"id": RUN}, "steps": wanted_steps, "max_staleness": max_staleness, "alarms": thresholds}
    create_run(store, load_config({**given, "rewards": {"functions": [{"path": "exact_match"}]}}))
    ledger = Ledger(store, RUN)
    ledger.commit_init(init_entry())
    for one in entries:
        assert ledger.commit({**one, "previous": ledger.previous(one["batch"])})
    return store


def test_the_report_finds_them_again_in_the_store(tmp_path: Path):
    entries = steps(12, kl=lambda b: 2.0 if b > 4 else 0.1)
    store = stored(entries)
    assert alarms(collect(store, RUN)) == alarms_of(AlarmSection(), entries)
    html = write_report(store, [RUN], tmp_path).page.read_text()
    assert "the KL to the reference model is 2 nats per token" in html
    assert ">Alarms</h3>" in html
    assert "Alarms</h3>" not in write_report(stored(steps(12)), [RUN], tmp_path / "quiet").page.read_text()


def test_the_report_finds_a_silence_between_two_commits_of_one_process():
    late = lambda attempt: [
        *steps(3),
        *(
            {**one, "attempt": attempt, "finished_at": (START + timedelta(minutes=50)).isoformat()}
            for one in steps(1, 3)
        ),
    ]
    (alarm,) = alarms(collect(stored(late("a0")), RUN))
    assert (alarm.name, alarm.step, alarm.message) == ("silent", 4, "no new object for 48 minutes, limit 30 minutes")
    assert alarms(collect(stored(late("resumed")), RUN)) == []
    assert alarms(collect(stored(late("a0"), silent_minutes=None), RUN)) == []


def test_shards_that_were_stored_in_between_are_no_silence():
    entries = steps(4)
    entries[3]["finished_at"] = (START + timedelta(minutes=50)).isoformat()
    for staleness, found in ((0, ["silent"]), (1, [])):
        store = stored(entries, max_staleness=staleness)
        for batch, minute in ((3, 15), (4, 40)):  # one of the step, one of the batch after it
            at = {"finished_at_s": START.timestamp() + 60.0 * minute}
            store.publish(layout.episodes(RUN, batch, 0, 0), {"x.parquet": b"x"}, request="x", provenance=at)
        assert [alarm.name for alarm in alarms(collect(store, RUN))] == found
        limited = stored(entries, max_staleness=staleness)
        assert [alarm.name for alarm in alarms(collect(limited, RUN))] == ["silent"]


def test_the_longest_gap_is_between_neighbours_in_time():
    assert longest_gap([10.0, 0.0, 4.0]) == 6.0
    assert longest_gap([1.0]) == 0.0


def screen(store: Store, capsys: pytest.CaptureFixture[str]) -> str:
    watching.show_once(Watched(store, RUN))
    return capsys.readouterr().out


def test_watching_shows_the_alarms_of_the_newest_steps(capsys: pytest.CaptureFixture[str]):
    text = screen(stored(steps(12, kl=lambda b: 2.0 if b > 4 else 0.1)), capsys)
    assert "the KL to the reference model is 2 nats per token" in text
    assert "(step 8)" in text
    assert "alarm" not in screen(stored(steps(100, kl=lambda b: 2.0 if b < 10 else 0.1)), capsys)


def test_watching_shows_that_nothing_new_is_stored_unless_somebody_stopped_the_run(
    capsys: pytest.CaptureFixture[str],
):
    silent = stored(steps(2), silent_minutes=1e-4)
    time.sleep(0.02)
    assert "no new object for 0 minutes" in screen(silent, capsys)
    request_stop(silent, RUN)
    assert "no new object" not in screen(silent, capsys)
    finished = stored(steps(2), wanted_steps=2, silent_minutes=1e-4)
    assert "no new object" not in screen(finished, capsys)


# Room in the store --------------------------------------------------------------------------------------------------


def test_the_room_on_the_disk_of_a_folder_is_measured(tmp_path: Path):
    measured = Space(open_store(str(tmp_path)), count=True).measured()
    assert measured.keys() == {FREE}
    assert measured[FREE] > 0


def test_the_objects_of_a_bucket_are_counted_where_its_size_is_stated():
    store = stored(steps(1))
    assert Space(store, count=False).measured() == {}
    space = Space(store, count=True)
    assert space.measured() == {}, "a step does not wait"
    space.close(5.0)
    assert space.measured() == {STORED: float(sum(store.sizes("").values()))}

"""Where a recorded value goes, from whatever thread or process."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from forge_core.config import load_config
from forge_core.engine_thread import EngineThread
from forge_core.observability.metrics import Metric, collecting, drained, record_metric, replay, streaming
from forge_core.observability.reductions import Reduce, reduce_metrics_states
from forge_core.rewards.actor import RewardActor
from forge_core.rewards.grading import RewardItem
from forge_core.runs.recording import recorded_by_trainer
from forge_core.store import StoreError

REWARD = """
from forge_core.observability.metrics import record_metric
from forge_core.observability.reductions import Reduce

def grade(prompt, completion, metadata):
    record_metric("reward/grade/words", len(completion.split()))
    record_metric("reward/grade/calls", 1, Reduce.SUM)
    return 1.0
"""


@pytest.fixture(autouse=True)
def _nothing_before():
    drained()


def values(states: dict) -> dict[str, float]:
    return {one.key: one.value for one in reduce_metrics_states(states.values())}


def test_what_a_stage_records_is_its_own():
    with collecting() as first:
        record_metric("a", 1.0)
        with collecting() as second:
            record_metric("a", 5.0)
        record_metric("a", 3.0)
    assert values(drained(second)) == {"a": 5.0}
    assert values(drained(first)) == {"a": 2.0}


def test_what_an_engines_thread_records_belongs_to_the_stage_that_asked():
    engine = EngineThread("test-engine")
    try:
        found = []

        def stage(value: float) -> None:
            with collecting() as collector:
                engine.call(record_metric, "a", value)
            found.append(collector.drain())

        threads = [threading.Thread(target=stage, args=(value,)) for value in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(values(states)["a"] for states in found) == [1.0, 2.0]
    finally:
        engine.close()


def test_what_no_stage_recorded_goes_with_what_is_published_next_once():
    record_metric("outside", 2.0)
    with collecting() as collector:
        record_metric("outside", 4.0)
    assert values(drained(collector)) == {"outside": 3.0}
    assert drained() == {}


def test_a_step_that_failed_leaves_its_values_to_the_next_try():
    def step() -> None:
        with collecting(keep=True):
            record_metric("kept", 1.0)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        step()
    assert values(drained()) == {"kept": 1.0}


def test_a_commit_that_failed_leaves_its_values_to_the_next_try():
    def commit() -> None:
        with recorded_by_trainer() as entry:
            assert values(entry["recorded"]) == {"kept": 2.0}
            raise StoreError("gone")

    with collecting(keep=True):
        record_metric("kept", 1.0)
        record_metric("kept", 3.0)
        with pytest.raises(StoreError, match="gone"):
            commit()
    with collecting(keep=True), recorded_by_trainer() as entry:
        record_metric("kept", 8.0)
    assert values(entry["recorded"]) == {"kept": 2.0}
    assert values(drained()) == {"kept": 8.0}


def test_ranks_stay_apart_until_they_are_merged():
    with collecting() as collector:
        for rank in (0, 1):
            replay([Metric("loss", float(rank)), Metric("loss", 4.0)], rank)
    states = drained(collector)
    assert {rank: values({rank: one})["loss"] for rank, one in states.items()} == {"0": 2.0, "1": 2.5}
    assert values(states) == {"loss": 2.25}


def test_wrong_values_are_left_out_with_one_warning(caplog: pytest.LogCaptureFixture):
    with collecting() as collector, caplog.at_level(logging.WARNING, "forge"):
        for _ in range(3):
            record_metric("text", "much")
        record_metric("table", 1.0, Reduce.SAMPLE)
        record_metric("mixed", 1.0, Reduce.MAX)
        record_metric("mixed", 2.0, Reduce.MEAN)
    assert values(drained(collector)) == {"mixed": 1.0}
    assert [record.args[0] for record in caplog.records if "is not recorded" in record.msg] == [
        "text",
        "table",
        "mixed",
    ]


class Unfit:
    def __float__(self) -> float:
        raise RuntimeError("a tensor of two")


def test_values_that_nobody_could_store_are_left_out_and_never_sent_on(caplog: pytest.LogCaptureFixture):
    seen: list[Metric] = []
    with streaming(seen.append), collecting() as collector, caplog.at_level(logging.WARNING, "forge"):
        record_metric("unfit", Unfit())
        record_metric("huge", 10**400)
        record_metric("nan", {"reward": float("nan")}, Reduce.SAMPLE)
        record_metric("long", {"text": "x" * 100_000}, Reduce.SAMPLE)
        record_metric("mixed keys", {1: "a", "b": "c"}, Reduce.SAMPLE)
        record_metric("own", torch_like := Number(2.0))
    assert values(drained(collector)) == {"own": 2.0}
    assert [(metric.key, metric.value, type(metric.value)) for metric in seen] == [("own", 2.0, float)]
    assert torch_like is not seen[0].value
    assert [record.args[0] for record in caplog.records if "is not recorded" in record.msg] == [
        "unfit",
        "huge",
        "nan",
        "long",
        "mixed keys",
    ]


class Number:
    def __init__(self, value: float) -> None:
        self._value = value

    def __float__(self) -> float:
        return self._value


def test_nothing_is_recorded_when_metrics_are_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORGE_DISABLE_METRICS", "1")
    with collecting() as collector:
        record_metric("a", 1.0)
    assert drained(collector) == {}


def test_a_stream_gets_every_value_as_it_is_recorded():
    seen: list[Metric] = []
    with streaming(seen.append), collecting():
        record_metric("a", 1.0)
        record_metric("a", 2.0, Reduce.MAX)
    record_metric("a", 3.0)
    drained()
    assert [(metric.value, metric.reduction) for metric in seen] == [(1.0, Reduce.MEAN), (2.0, Reduce.MAX)]


def test_values_of_grading_processes_count_exactly_once(tmp_path: Path):
    (tmp_path / "words.py").write_text(REWARD)
    config = load_config({"rewards": {"functions": [{"path": f"{tmp_path}/words.py:grade"}], "workers": 2}})
    rewards = RewardActor.from_config(config.rewards)
    items = [RewardItem("p", " ".join("w" * n), {}) for n in range(1, 21)]
    try:
        with collecting() as collector:
            rewards.grade_many(items)
    finally:
        rewards.close()
    assert values(drained(collector)) == {"reward/grade/words": 10.5, "reward/grade/calls": 20.0}

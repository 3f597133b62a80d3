"""``benchmarks/overlap_gpu.py``: over which steps a run is measured, and with which G."""

from __future__ import annotations

from argparse import Namespace
from datetime import UTC, datetime
from typing import Any

import pytest

from benchmarks.checks import AGE, MISMATCH, wrong
from benchmarks.overlap_gpu import chained, compared, figures, runs_of, steps_of, turns_of

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("measured", [1, 3, 5, 12])
def test_whole_turns_are_measured_after_the_first_and_before_generation_ends(staleness: int, measured: int) -> None:
    steps, turn = steps_of(measured, staleness), staleness + 1
    assert measured <= turns_of(steps, staleness) * turn < measured + turn
    assert staleness + turns_of(steps, staleness) * turn == steps - 1 - staleness, "the last batch is being sampled"
    assert turns_of(steps - 1, staleness) == turns_of(steps, staleness) - 1, "in the last turn nothing would be sampled"


def test_runs_come_in_the_order_asked_for_and_one_is_serial() -> None:
    assert runs_of(["long_tail", "fixed"], [0, 4]) == [
        ("long_tail-0", 0),
        ("long_tail-4", 4),
        ("fixed-0", 0),
        ("fixed-4", 4),
    ]
    assert runs_of(["serial"], [0, 1, 2, 4]) == [("serial-2", 2)]


def entry(end: float, train: float, publish: float = 0.0) -> dict[str, Any]:
    finished = datetime.fromtimestamp(end, UTC).isoformat()
    return {"finished_at": finished, "tokens": 10, "metrics": {"time/train": train, "time/publish": publish}}


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_of_batches_that_come_in_turns_a_step_takes_its_share_of_a_turn(staleness: int) -> None:
    """Sampling takes 10 s, a training step 1 s, and batch b waits for training step b - S - 1: (10 + 1) / (S + 1)."""
    ends: list[float] = []
    calls = []
    for batch in range(steps_of(3, staleness)):
        begin = ends[batch - staleness - 1] if batch > staleness else 0.0
        calls.append((batch, begin, begin + 10.0))
        ends.append(max(begin + 10.0, ends[-1] if ends else 0.0) + 1.0)
    found = figures([entry(end, 1.0) for end in ends], calls, staleness)
    assert found["step_s"] == pytest.approx(11.0 / (staleness + 1))
    assert found["longest_call_s"] == 10.0
    assert found["trainer_idle"] == pytest.approx(1 - (staleness + 1) / 11.0)


def test_publishing_is_part_of_a_training_step() -> None:
    """Without staleness: 8 s of sampling, 1 s of training, 0.5 s of publishing, and 0.5 s of neither."""
    entries = [entry(10.0 * n + 10, 1.0, 0.5) for n in range(4)]
    found = figures(entries, [(n, 10.0 * n, 10.0 * n + 8) for n in range(4)], 0)
    idle = (found["trainer_idle"], found["generator_idle"], found["neither"])
    assert idle == pytest.approx((0.85, 0.2, 0.05))


def test_each_term_of_the_formula_decides_where_it_is_the_largest() -> None:
    """W is what the engine takes for the tokens of a batch at full load, whatever the runs took."""
    run = {"tokens": 600, "train_s": 1.5, "publish_s": 0.5, "step_s": 11.0}
    runs = {f"fixed-{s}": {**run, "longest_call_s": longest} for s, longest in ((0, 18.0), (1, 18.0), (4, 20.0))}
    for rate, expected in ((100.0, (20.0, 10.0, 6.0)), (600.0, (20.0, 10.0, 4.4)), (50.0, (20.0, 12.0, 12.0))):
        compared(runs, {"fixed": None}, Namespace(staleness=[0, 1, 4]), rate)
        assert tuple(r["formula_s"] for r in runs.values()) == pytest.approx(expected)
        assert [r["over_formula"] for r in runs.values()] == [round(11.0 / s, 3) for s in expected]
    slow = {"fixed-4": {**run, "longest_call_s": 1.0, "train_s": 30.0}}
    compared(slow, {"fixed": None}, Namespace(staleness=[4]), 100.0)
    assert slow["fixed-4"]["formula_s"] == 30.5


def test_g_is_the_mean_over_batches_that_wait_for_each_other() -> None:
    shards = [(0, 1.0), (0, 4.0), (1, 6.0), (2, 8.0), (3, 2.0)]
    assert chained(shards, 1) == 6.0, "batches 0 and 2; 1 and 3 take 4.0"
    assert chained(shards, 0) == 5.0


def trained(step: int, **metrics: float) -> dict[str, Any]:
    return {"version_out": step, "metrics": {key.replace("__", "/"): value for key, value in metrics.items()}}


def test_a_run_on_episodes_that_are_too_old_or_not_the_trainers_is_wrong() -> None:
    right = [trained(1, age__count__0=8, mismatch__one_version_mean_abs_logprob=0.2), trained(2, age__count__2=8)]
    assert wrong(right, 2, "bfloat16") == []
    assert wrong(right, 1, "bfloat16") == ["step 2 trained on episodes 2 steps old, allowed are 1"]
    assert wrong(right, 2, "float32") == ["step 1: log-probabilities differ by 0.2 nats, allowed are 0.001"]
    older = [trained(4, age__count__2=8, mismatch__one_version_mean_abs_logprob=0.004)]
    assert wrong(older, 2, "float32") == [], "two steps of learning are between"
    assert wrong([trained(1)], 0, "float32") == [f"no step says {key}" for key in (AGE, MISMATCH)]
    unknown = [trained(3, age__count__0=8, mismatch__one_version_mean_abs_logprob=float("nan"))]
    assert wrong(unknown, 2, "bfloat16") == ["step 3: log-probabilities differ by nan nats, allowed are 0.25"]

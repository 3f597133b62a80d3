"""Values of many ranks come to what one rank would have made of all of them, bit for bit."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.observability.metrics import Collector, Metric
from forge_core.observability.reductions import SAMPLES, Reduce, accumulator, reduce_metrics_states

NUMBERS = [r for r in Reduce if r is not Reduce.SAMPLE]
floats = st.floats(allow_nan=False, allow_infinity=False, width=64)


def states_of(values: list[Any], reduction: Reduce) -> dict[str, Any]:
    collector = Collector()
    for value in values:
        collector.push(Metric("k", value, reduction))
    return json.loads(json.dumps(collector.drain()))["0"]


@pytest.mark.parametrize("reduction", NUMBERS)
@settings(max_examples=40, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=30), cut=st.integers(0, 30), seed=st.integers(0, 9))
def test_merging_in_any_split_and_order_equals_one_rank_bit_for_bit(reduction, values, cut, seed):
    (whole,) = reduce_metrics_states([states_of(values, reduction)])
    shuffled = random.Random(seed).sample(values, len(values))
    parts = [part for part in (shuffled[:cut], shuffled[cut:]) if part]
    (merged,) = reduce_metrics_states([states_of(part, reduction) for part in reversed(parts)])
    assert (merged.value, merged.count) == (whole.value, len(values))


def test_reductions_are_what_their_names_say():
    values = [5.0, 7.0]
    found = {r: reduce_metrics_states([states_of([v], r) for v in values])[0].value for r in NUMBERS}
    assert found == {Reduce.MEAN: 6.0, Reduce.SUM: 12.0, Reduce.MAX: 7.0, Reduce.MIN: 5.0, Reduce.STD: 1.0}
    assert reduce_metrics_states([states_of([3.0], Reduce.STD)])[0].value == 0.0


def test_a_sum_that_floats_would_round_is_exact():
    assert reduce_metrics_states([states_of([1e100, 1.0], Reduce.SUM), states_of([-1e100], Reduce.SUM)])[0].value == 1.0


@pytest.mark.parametrize("reduction", NUMBERS)
def test_a_value_that_is_no_number_is_seen(reduction):
    (found,) = reduce_metrics_states([states_of([1.0], reduction), states_of([math.nan, 2.0], reduction)])
    assert math.isnan(found.value)
    assert found.count == 3


def test_infinity_stays_infinity():
    assert reduce_metrics_states([states_of([1.0, math.inf], Reduce.MEAN)])[0].value == math.inf


def test_one_key_reduced_in_two_ways_is_refused():
    with pytest.raises(ValueError, match="'k' is recorded as max and as mean"):
        reduce_metrics_states([states_of([1.0], Reduce.MEAN), states_of([1.0], Reduce.MAX)])


def test_no_states_are_no_metrics():
    assert reduce_metrics_states([]) == []
    assert accumulator(Reduce.MEAN).value() == 0.0


def test_of_many_samples_the_best_and_the_worst_stay_whatever_rank_had_them():
    rows = [{"text": f"t{i:03d}", "reward": float(i)} for i in range(100)]
    random.Random(0).shuffle(rows)
    (found,) = reduce_metrics_states([states_of(rows[i::3], Reduce.SAMPLE) for i in range(3)])
    half = SAMPLES // 2
    assert [row["reward"] for row in found.value] == [*range(99, 99 - half, -1), *range(half - 1, -1, -1)]
    assert found.count == 100

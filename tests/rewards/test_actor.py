"""Combining rewards: weights, components, failures, and RewardActor as a base class. All in this process."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.config.reward_sections import RewardFunction
from forge_core.config.run_config import RewardsSection
from forge_core.rewards import Graded, RewardActor, RewardError, RewardItem
from forge_core.rewards.grading import Grading, combine
from forge_core.stop import Stopped, StopToken


class CustomReward(RewardActor):
    """As a user writes it: no ``__init__``, no call of the base class."""

    def grade(self, prompt, completion, metadata):
        returned = metadata.get("returned", len(completion))
        if isinstance(returned, Exception):
            raise returned
        return returned


class WithState(RewardActor):
    def __init__(self, bonus: float):
        self.bonus = bonus

    def grade(self, prompt, completion, metadata):
        return self.bonus


def built_in(*functions: RewardFunction) -> RewardActor:
    return RewardActor(list(functions))


def test_the_reward_is_the_weighted_sum_and_components_are_unweighted():
    actor = built_in(RewardFunction(path="exact_match", weight=2.0), RewardFunction(path="last_integer", weight=-0.5))
    graded = actor.grade_many([RewardItem("p", text, {"answer": "4"}) for text in ("4", "is 4", "no")])
    assert graded == [
        Graded(1.5, {"exact_match": 1.0, "last_integer": 1.0}),
        Graded(-0.5, {"exact_match": 0.0, "last_integer": 1.0}),
        Graded(0.0, {"exact_match": 0.0, "last_integer": 0.0}),
    ]


def test_a_reward_used_twice_has_two_components():
    strict = RewardFunction(path="exact_match", options={"require_eos": True})
    graded = built_in(RewardFunction(path="exact_match"), strict).grade_many(
        [RewardItem("p", "4", {"answer": "4", "finish_reason": "length"})]
    )
    assert graded[0].components == {"exact_match": 1.0, "exact_match#2": 0.0}


def test_one_failed_component_makes_the_reward_null_and_keeps_the_others():
    actor = built_in(RewardFunction(path="exact_match"), RewardFunction(path="last_integer"))
    graded = actor.grade_many([RewardItem("p", "four", {"answer": "four"})])[0]
    assert (graded.reward, graded.status, graded.components) == (None, "error", {"exact_match": 1.0})
    assert graded.error is not None
    assert graded.error.startswith("last_integer: ValueError: the answer 'four' is not an integer (last_integer.py:")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (math.nan, "ValueError: grade returned nan, which is not finite"),
        (math.inf, "grade returned inf"),
        (np.float32("nan"), "not finite"),
        (None, "TypeError: grade returned None (NoneType), which is not a number"),
        ("1.0", "grade returned '1.0' (str), which is not a number"),
        ([1.0], "(list), which is not a number"),
        (KeyError("score"), "KeyError: 'score' (test_actor.py:"),
    ],
)
def test_what_is_no_finite_number_is_null_never_zero(returned: object, text: str):
    graded = CustomReward().grade_many([RewardItem("p", "c", {"returned": returned})])[0]
    assert graded.reward is None
    assert graded.components == {}
    assert graded.status == "error"
    assert text in (graded.error or "")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_a_batch_of_grades_says_is_checked_too(value: float):
    gradings = [("model", Grading(value, parts={"a": 1.0, "b": value})), ("other", Grading(1.0))]
    graded = combine(gradings, {"model": 1.0, "other": 1.0})
    assert (graded.reward, graded.status) == (None, "error")
    assert graded.error == f"model: the grade is {value}, which is not finite"
    assert graded.components == {"model/a": 1.0, "other": 1.0}


def test_a_sum_that_is_no_finite_number_is_an_error():
    graded = combine([("one", Grading(1e308)), ("two", Grading(1e308))], {"one": 1.0, "two": 1.0})
    assert (graded.reward, graded.status) == (None, "error")
    assert "sum of the weighted grades is inf" in (graded.error or "")


@pytest.mark.parametrize(
    ("returned", "expected"), [(True, 1.0), (False, 0.0), (3, 3.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0)]
)
def test_numbers_of_every_kind_are_accepted(returned: object, expected: float):
    reward = CustomReward().grade_many([RewardItem("p", "c", {"returned": returned})])[0].reward
    assert reward == expected
    assert type(reward) is float


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(-10, 10), st.none()), max_size=30))
def test_order_is_kept_and_nulls_are_exactly_the_failures(values: list[float | None]):
    graded = CustomReward().grade_many([RewardItem("p", "c", {"returned": value}) for value in values])
    assert [g.reward for g in graded] == values
    assert [g.status == "ok" for g in graded] == [value is not None for value in values]


def test_a_subclass_grades_one_response_as_the_guide_shows():
    assert CustomReward().evaluate_response("2+2?", "four", "4") == ({"CustomReward": 4.0}, 4.0)
    assert WithState(0.25).evaluate_response("2+2?", "four", "4") == ({"WithState": 0.25}, 0.25)
    assert CustomReward().grade_many([RewardItem("p", "abc")]) == [Graded(3.0, {"CustomReward": 3.0})]


def test_evaluate_response_gives_the_plain_mean_of_the_components():
    actor = built_in(RewardFunction(path="exact_match", weight=10.0), RewardFunction(path="last_integer"))
    breakdown, mean = actor.evaluate_response("2+2?", "It is 4", "4")
    assert breakdown == {"exact_match": 0.0, "last_integer": 1.0}
    assert mean == 0.5
    assert actor.grade("2+2?", "4", {"answer": "4"}) == 11.0


def test_evaluating_a_failing_response_raises():
    actor = built_in(RewardFunction(path="last_integer"))
    with pytest.raises(RewardError, match="the answer 'x' is not an integer"):
        actor.evaluate_response("p", "4", "x")
    with pytest.raises(RewardError, match="the answer 'x' is not an integer"):
        actor.grade("p", "4", {"answer": "x"})


def test_no_functions_and_functions_beside_an_own_grade_are_refused():
    with pytest.raises(RewardError, match=r"rewards\.functions is empty"):
        RewardActor.from_config(RewardsSection())
    with pytest.raises(RewardError, match="CustomReward defines grade, so it takes no functions"):
        CustomReward([RewardFunction(path="exact_match")])


def test_throughput_is_reported():
    actor = built_in(RewardFunction(path="exact_match"))
    assert actor.grades_per_second == 0.0
    actor.grade_many([RewardItem("p", "4", {"answer": "4"})] * 100)
    assert actor.grades_per_second > 100


def test_no_items_give_no_grades():
    assert built_in(RewardFunction(path="exact_match")).grade_many([]) == []


def test_a_stop_ends_grading():
    stop = StopToken()
    stop.set("Ctrl-C")
    with pytest.raises(Stopped, match="Ctrl-C"):
        built_in(RewardFunction(path="exact_match")).grade_many([RewardItem("p", "4", {"answer": "4"})], stop=stop)

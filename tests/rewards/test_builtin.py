"""The rewards that come with Forge."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge_core.config.data_sections import DatasetSection
from forge_core.config.reward_sections import RewardFunction
from forge_core.data import load_prompts
from forge_core.rewards import RewardActor, RewardError, RewardItem, needs_answer
from forge_core.rewards.exact_match import ExactMatch
from forge_core.rewards.last_integer import LastInteger
from forge_core.rewards.reasoning_gym import ReasoningGym


@pytest.mark.parametrize(
    ("completion", "expected"), [("01247", 1.0), (" 01247\n", 1.0), ("01274", 0.0), ("", 0.0), ("01247 0", 0.0)]
)
def test_exact_match_compares_the_stripped_completion(completion: str, expected: float):
    assert ExactMatch().grade("s:47120=", completion, {"answer": "01247"}) == expected


@pytest.mark.parametrize(("finish_reason", "expected"), [("stop", 1.0), ("length", 0.0)])
def test_exact_match_can_require_that_the_model_ended(finish_reason: str, expected: float):
    metadata = {"answer": "4", "finish_reason": finish_reason}
    assert ExactMatch(require_eos=True).grade("", "4", metadata) == expected
    assert ExactMatch().grade("", "4", metadata) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is 42.", "42", 1.0),
        ("42 is wrong, it is 41", "42", 0.0),
        ("10-3=7", "7", 1.0),
        ("5-4", "4", 1.0),
        ("so -4", "-4", 1.0),
        ("so −4", "-4", 1.0),
        ("so 4", "-4", 0.0),
        ("1,080 in all", "1080", 1.0),
        ("1080", "1,080", 1.0),
        ("12.5", "5", 0.0),
        ("12.0", "12", 1.0),
        ("1/2", "2", 0.0),
        ("1, 2, 3", "3", 1.0),
        ("15", "5", 0.0),
        ("x5", "5", 1.0),
        ("$12", "$12", 1.0),
        ("it is 1e3", "1000", 1.0),
        ("it is 1e3", "3", 0.0),
        ("-1.5E+3.", "-1500", 1.0),
        ("1e\u22123", "3", 0.0),
        ("100e-2", "1", 1.0),
        ("1000", "1e3", 1.0),
        ("1e60", str(10**60), 1.0),
        ("1e3.5", "1000", 0.0),
        ("3e", "3", 1.0),
        ("1e999999999", "3", 0.0),
        ("1e99999999999999999999", "3", 0.0),
        ("the hash 0e99999999999999999999", "0", 0.0),
        ("none", "0", 0.0),
        ("", "0", 0.0),
        ("123456789012345678901234567890", "123456789012345678901234567891", 0.0),
    ],
)
def test_last_integer_reads_the_last_number(completion: str, answer: str, expected: float):
    assert LastInteger().grade("", completion, {"answer": answer}) == expected


@pytest.mark.parametrize("name", ["exact_match", "last_integer"])
def test_a_prompt_without_an_answer_is_an_error_not_a_zero(name: str):
    graded = RewardActor([RewardFunction(path=name)]).grade_many([RewardItem("p", "4", {"answer": None})])[0]
    assert graded.reward is None
    assert "set dataset.answer_column" in (graded.error or "")
    assert needs_answer(name)
    assert not needs_answer("reasoning_gym")
    assert not needs_answer("my_module:grade")


def test_an_answer_that_is_no_integer_is_an_error():
    with pytest.raises(ValueError, match="the answer 'four' is not an integer"):
        LastInteger().grade("", "4", {"answer": "four"})


def stored(task: str, **options: Any) -> tuple[str, dict[str, Any]]:
    section = DatasetSection(path=f"reasoning_gym://{task}", size=1, options=options)
    prompt = load_prompts(section, seed=1)[0]
    return prompt.target or "", json.loads(json.dumps({**prompt.metadata, "answer": prompt.target}))


def test_reasoning_gym_uses_the_verifier_of_the_task():
    answer, metadata = stored("chain_sum")
    assert ReasoningGym().grade("", answer, metadata) == 1.0
    assert ReasoningGym().grade("", f" {answer}\n", metadata) == 1.0
    assert ReasoningGym().grade("", "something else", metadata) == 0.0


def test_reasoning_gym_extracts_what_the_verifier_sees():
    answer, metadata = stored("chain_sum")
    text = f"<answer>1</answer> no: <answer> {answer} </answer>, because 5 is odd"
    assert ReasoningGym(extract="answer_tag").grade("", text, metadata) == 1.0
    assert ReasoningGym(extract="last_number").grade("", text, metadata) == 0.0
    assert ReasoningGym(extract="last_number").grade("", f"It is {answer}.", metadata) == 1.0
    for extract in ("answer_tag", "last_number"):
        assert ReasoningGym(extract=extract).grade("", "no idea", metadata) == 0.0


def test_the_last_number_of_reasoning_gym_is_written_out():
    _, metadata = stored("chain_sum")
    metadata["reasoning_gym"]["entry"]["answer"] = "1500"
    assert ReasoningGym(extract="last_number").grade("", "It is 1.5e3.", metadata) == 1.0


def test_reasoning_gym_verifiers_get_the_entry_as_it_was_made():
    for task in ("arc_agi", "countdown"):
        answer, metadata = stored(task)
        assert ReasoningGym().grade("", answer, metadata) == 1.0


def test_reasoning_gym_needs_a_prompt_of_a_task_and_a_known_extraction():
    with pytest.raises(KeyError, match="not from reasoning_gym"):
        ReasoningGym().grade("", "4", {"answer": "4"})
    with pytest.raises(RewardError, match=r"reasoning_gym with the options .*last_word.*must be all, last_number"):
        RewardActor([RewardFunction(path="reasoning_gym", options={"extract": "last_word"})])

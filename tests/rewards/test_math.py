"""The maths reward: recorded verdicts of math-verify, the original's tests, where an answer stands, hanging answers."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from forge_core.config.reward_sections import MathSection
from forge_core.rewards import RewardActor, RewardError, RewardItem
from forge_core.rewards.extraction import boxed
from forge_core.rewards.math import MathReward

VECTORS = Path(__file__).parents[1] / "conformance" / "vectors"
RECORDED = json.loads((VECTORS / "math_verify.json").read_text())
ORIGINAL = [v for v in json.loads((VECTORS / "torchforge.json").read_text()) if v["algorithm"] == "MathReward"]


def grade(completion: str | None, answer: Any, **options: Any) -> float:
    return MathReward(**options).grade("", completion, {"answer": answer})


@pytest.mark.parametrize("vector", RECORDED, ids=lambda vector: vector["name"])
def test_a_verdict_is_the_recorded_one_or_right_where_that_is_marked_wrong(vector: dict[str, Any]):
    given, outputs = vector["inputs"], vector["outputs"]
    assert bool(grade(given["answer"], given["gold"])) == outputs["author_expected"]
    if outputs["verdict"] != outputs["author_expected"]:
        assert "a person would say" in vector["notes"]


def test_there_are_as_many_verdicts_as_recorded_and_some_are_marked_wrong():
    wrong = [v for v in RECORDED if v["outputs"]["verdict"] != v["outputs"]["author_expected"]]
    assert (len(RECORDED), len(wrong)) == (100, 15)


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("$1500$", r"\boxed{1.5e3}", True),
        ("$-1$", r"\boxed{e^{i\pi}}", True),
        (r"$e^{i\pi}$", r"\boxed{-1}", True),
        (r"$5\text{ cm}$", r"\boxed{5\text{ m}}", False),
        ("5 cm", r"\boxed{5 centimeters}", True),
        (r"16\text{ cm}^2", r"\boxed{16\text{ cm}^3}", False),
        (r"16\text{ cm}^2", r"\boxed{16\text{ square centimeters}}", True),
        (r"90^\circ", r"\boxed{90\text{ radians}}", False),
        ("2m", r"\boxed{2}", False),
        ("2 m", r"\boxed{2}", True),
        ("2m+1", r"\boxed{1+2m}", True),
        ("$x$", r"\boxed{X}", False),
        (r"\frac13", r"\boxed{0.33333333333333333333}", False),
        (r"\pi", r"\boxed{3.14159265358979}", False),
        ("0.1", r"\boxed{\frac{1}{10}}", True),
        (r"x \le 2", r"\boxed{(-\infty,2]}", True),
        ("x<2", r"\boxed{(-\infty,2]}", False),
        ("2", r"\boxed{\log 100}", True),
        (r"2\log 2", r"\boxed{\log 4}", True),
        ("10^{100}", r"\boxed{1e100}", True),
        ("12.34.56", r"\boxed{12.34}", False),
        (r"\$32,348", r"\boxed{32348}", True),
        (r"50\%", r"\boxed{0.5}", True),
        (r"\emptyset", r"\boxed{\varnothing}", True),
        (r"\text{Evelyn}", r"\boxed{Evelyn}", True),
        ("B", "So the answer is (B).", True),
        ("123456789012345678901234567890", r"\boxed{123456789012345678901234567891}", False),
        ("(2,3)", r"\boxed{3,2}", False),
        ("(2,3)", r"\boxed{\{3,2\}}", False),
        ("(2,3)", r"\boxed{x=3, y=2}", False),
        ("(2,3)", r"\boxed{y=3, x=2}", True),
        ("x=2, y=3", r"\boxed{(3,2)}", False),
        ("x=2, y=3", r"\boxed{(2,3)}", True),
        ("x=2, y=3", r"\boxed{a=2, b=3}", False),
        ("(1,2,3)", r"\boxed{3,2,1}", False),
        ("1,2,3", r"\boxed{(3,2,1)}", True),
        (r"\langle 1,2\rangle", r"\boxed{1.2}", False),
        (r"\langle 1,2\rangle", r"\boxed{(1,2)}", True),
        ("5", r"\boxed{5\\6}", False),
        ("5", r"\boxed{5\\}", True),
        ("5", r"\boxed{5|6}", False),
        ("3", r"\boxed{1 2}", False),
        ("1.5", r"\boxed{1 1/2}", True),
        ("5", r"\boxed{5&6}", False),
        ("5", r"\boxed{5..10}", False),
        ("5", r"\boxed{\ge 5}", False),
        ("5", r"\boxed{5+}", False),
        ("5", r"\boxed{5\text{6}}", False),
        ("5", r"\boxed{5\text{ million}}", False),
        ("5,000,000", r"\boxed{5\text{ million}}", True),
        ("2.5 thousand", r"\boxed{\$2500}", True),
        ("east", r"\boxed{seat}", False),
        ("abc", r"\boxed{bca}", True),
        ("xy", r"\boxed{yx}", True),
        ("at", r"\boxed{ta}", True),
        ("OA", r"\boxed{AO}", True),
        ("no", r"\boxed{on}", False),
        ("no", r"\boxed{No}", True),
        ("Tom", r"\boxed{mTo}", False),
        ("east side", r"\boxed{seat side}", False),
        ("east side", r"\boxed{East Side}", True),
        ("two", r"\boxed{tow}", False),
        ("no", r"\boxed{\text{no}}", True),
        ("3", r"\boxed{1e99999999999999999999}", False),
        ("A", r"\boxed{\textbf{(A)}\ 12}", True),
        ("B", r"\boxed{\textbf{(A)}\ 12}", False),
        (r"\frac32", r"\boxed{1½}", True),
        (r"2\sqrt{3}", r"\boxed{2√3}", True),
        ("x^{10}", r"\boxed{x¹⁰}", True),
        ("a_{12}", r"\boxed{a₁₂}", True),
        (r"\infty", r"\boxed{∞}", True),
        ("6", r"\boxed{2·3}", True),
    ],
)
def test_what_is_the_same_mathematics(answer: str, completion: str, right: bool):
    assert grade(completion, answer) == right


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The answer is **5**.", "5"),
        ("**Answer:** `5`", "5"),
        ("it is 5e0", "5"),
        ("I get 1e3", "1000"),
        ("The answer is therefore 5, and not 6.", "5"),
        ("The answer is 2*3*4.", "24"),
        ("The correct option is (A).", "A"),
        ("The correct answer is option A.", "A"),
        ("She makes $18 a day and $126 a week.", "126"),
        ("It costs $20 and the change is $5", "5"),
        ("The price is $5-$10, so the mean is $7.50$", "7.5"),
        ("It costs $20, so $ \\frac{1}{2} $ is left", r"\frac12"),
        (r"With \(x = 3\) the area is \[x^2\] or $9$", "9"),
    ],
)
def test_an_answer_without_a_mark_is_found_in_prose(completion: str, answer: str):
    assert grade(completion, answer) == 1.0
    assert grade(completion, "18") == 0.0


# Behaviours that the original's tests assert, with the settings of its reward.
AS_ORIGINAL: dict[str, Any] = {"partial_credit": 0.1, "extract": "answer_tag", "take": "first"}


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("<answer>42.0000001</answer>", "42", 1.0),
        ("<answer>42.1</answer>", "42", 0.0),
        ("<answer>\n  42\t</answer>", "42", 1.0),
        ("<answer>$1,000</answer>", "1000", 1.0),
        ("<answer>1,234.56</answer>", "1234.56", 1.0),
        ("<answer>$ 42.50 </answer>", "42.5", 1.0),
        ("<answer>12.34.56</answer>", "12.34", 0.0),
        ("<answer>abc</answer>", "42", 0.0),
        ("<answer></answer>", "42", 0.0),
        ("<answer>1e6</answer>", "1000000", 1.0),
        ("<answer>-42</answer>", "-42", 1.0),
        ("<answer>0.0</answer>", "0", 1.0),
        ("I found 117 of them", "117.0", 0.1),
        ("It is 42. <answer>41</answer>", "42", 0.1),
        ("It is 42.", "42", 0.1),
        ("<answer>42</answer> or <answer>41</answer>", "42", 1.0),
        ("<answer>41</answer> or <answer>42</answer>", "42", 0.0),
        ("<answer>42</answer>", "", 0.0),
        ("<answer>42</answer>", "invalid", 0.0),
        ("", "42", 0.0),
        (None, "42", 0.0),
    ],
)
def test_the_originals_behaviours_hold(completion: str | None, answer: str, expected: float):
    assert grade(completion, answer, **AS_ORIGINAL) == expected


@pytest.mark.parametrize(("given", "expected"), [("42.0001", 1.0), ("42.01", 0.0)])
def test_the_tolerance_can_be_wider(given: str, expected: float):
    assert grade(f"<answer>{given}</answer>", "42", tolerance=1e-3, **AS_ORIGINAL) == expected


@pytest.mark.parametrize("vector", ORIGINAL, ids=lambda vector: vector["name"])
def test_the_originals_recorded_rewards_are_ours_but_for_numbers_inside_others(vector: dict[str, Any]):
    given = vector["inputs"]
    expected = 0.0 if given["response"] == "142 is not it" else vector["outputs"]["reward"]
    assert grade(given["response"], given["target"], **AS_ORIGINAL) == expected


@pytest.mark.parametrize("text", ["15 apples", "x5", "5.25", "1/5", "5/6", "v5", "3.5", "1,205"])
def test_partial_credit_is_for_a_number_of_its_own(text: str):
    assert grade(text, "5", **AS_ORIGINAL) == 0.0
    assert grade(f"{text}, so 5.", "5", **AS_ORIGINAL) == 0.1


@pytest.mark.parametrize(
    ("completion", "options", "right"),
    [
        (r"<answer>41</answer><answer>42</answer>", {}, True),
        (r"<answer>41</answer><answer>42</answer>", {"take": "first"}, False),
        (r"\boxed{42}, no: \boxed{41}", {"take": "first"}, True),
        (r"\boxed{42} <answer>41</answer>", {}, False),
        (r"\boxed{42} <answer>41</answer>", {"extract": "boxed"}, True),
        (r"\boxed{42}", {"extract": "answer_tag"}, False),
        (r"<answer>\boxed{42}</answer>", {}, True),
        (r"<think>\boxed{42}</think> so \boxed{41}", {}, False),
        (r"<think>\boxed{41}</think> so \boxed{42}", {"take": "first"}, True),
        (r"<think>It is \boxed{42}</think> and that is that", {}, False),
        (r"<think>one</think><THINK>\boxed{41}</ THINK >\boxed{42}", {"take": "first"}, True),
        ("The answer is 42, because of 7 and 3.", {}, True),
        ("The answer is 42.", {"extract": "boxed"}, False),
        ("It takes 3 days, so it's 42.", {}, True),
        (r"\boxed{41} and \boxed{42}", {}, False),
        (r"\boxed{42} and \boxed{41}", {"take": "first"}, False),
        (r"42 \boxed{42", {}, False),
        (r"\fbox{42}", {}, True),
    ],
)
def test_where_the_answer_stands_is_a_setting(completion: str, options: dict[str, Any], right: bool):
    assert grade(completion, "42", **options) == right


def test_boxes_are_balanced_and_the_inner_one_counts():
    assert boxed(r"\boxed{\frac{1}{2}} then \boxed{\boxed{7}} then \boxed{3") == [r"\frac{1}{2}", "7"]
    assert boxed(r"\boxed{\{1, 2\}}") == [r"\{1, 2\}"]
    assert boxed(r"\boxed 5") == boxed(r"\boxed5") == ["5"]
    assert boxed(r"\boxedx{5}") == []
    assert boxed(r"\boxed{1}, \boxed{2} and $\boxed{3}$; but \boxed{4}") == ["1, 2, 3", "4"]


def test_a_prompt_without_an_answer_is_an_error_and_unknown_settings_are_too():
    with pytest.raises(KeyError, match=r"set dataset\.answer_column"):
        grade("42", None)
    with pytest.raises(RewardError, match="extract is any, answer_tag or boxed"):
        RewardActor([MathSection(name="math").model_copy(update={"extract": "nowhere"})])


PARTS = [
    *(
        r"\boxed{",
        "}",
        "{",
        r"\frac",
        "{1}{2}",
        r"\sqrt",
        "$",
        r"\text{",
        "cm",
        "^",
        "_",
        "x",
        "=",
        "<",
        r"\infty",
        "(",
    ),
    *(
        ")",
        "[",
        "]",
        ",",
        "1",
        "23",
        "0.5",
        r"\pi",
        r"\log",
        "i",
        "e",
        "%",
        r"\%",
        r"\left",
        r"\right",
        "<answer>",
        "and",
    ),
    *("</answer>", r"\begin{pmatrix}", "&", r"\\", r"\end{pmatrix}", " ", "\x00", "٣", "½", "∞", "\\", "</think>"),
]
GOLDS = ["5", r"\frac12", "(1,2)", "x^2", r"\begin{pmatrix}1&2\end{pmatrix}", r"5\text{ cm}", "A"]


def test_whatever_a_model_writes_is_right_or_wrong_but_no_error():
    rng = random.Random(0)
    texts = ["".join(rng.choices(PARTS, k=rng.randint(1, 25))) for _ in range(200)]
    actor = RewardActor([MathSection(name="math", timeout_s=30)], workers=1)
    try:
        graded = actor.grade_many([RewardItem("", text, {"answer": rng.choice(GOLDS)}) for text in texts])
    finally:
        actor.close()
    assert [(t, g.error) for t, g in zip(texts, graded, strict=True) if g.reward not in (0.0, 1.0)] == []


REPEATED = [
    *(
        "<answer>",
        "<think>",
        "</think>",
        r"\boxed{",
        r"\boxed{5} ",
        r"\(",
        r"\[",
        "$",
        "$1",
        "{",
        "the answer is ",
        "1",
        "1,",
    ),
    *(r"\frac{1}{2}", "```python\n", "<parameter=a>", "\n", " ", "**"),
]
LONG = 60_000  # characters: in time that grows with the square, each would take from several seconds to minutes


@pytest.mark.parametrize("part", REPEATED)
def test_what_a_model_repeats_without_an_end_is_graded_in_no_time(part: str):
    from forge_core.environments.tool_calls import llama_calls, qwen_coder_calls
    from forge_core.rewards.code import last_block
    from forge_core.rewards.language import words_of
    from forge_core.rewards.thinking import ThinkingReward

    text = part * (LONG // len(part))
    start = time.process_time()
    assert grade(text, r"\frac34", partial_credit=0.1) == 0.0
    assert grade(rf"\boxed{{1{text}2}}", "3") == 0.0
    assert grade(f"the answer is 1{text}2", "3") == 0.0
    assert ThinkingReward().grade("", text, {}) <= 0.2
    last_block(text)
    words_of(text)
    llama_calls(text)
    qwen_coder_calls([], f"<function=a>{text}")
    assert time.process_time() - start < 1.5


HANGS = r"\boxed{9^{9^{9^{9^{9}}}}}"


def test_a_hanging_answer_costs_one_timeout_and_is_no_zero():
    actor = RewardActor([MathSection(name="math", timeout_s=2.0)], workers=1)
    try:
        graded = actor.grade_many([RewardItem("p", text, {"answer": "5"}) for text in (r"\boxed{5}", HANGS, "5", "6")])
    finally:
        actor.close()
    assert [g.reward for g in graded] == [1.0, None, 1.0, 0.0]
    assert graded[1].status == "timeout"
    assert graded[1].error == "math: took longer than its timeout_s=2 s"

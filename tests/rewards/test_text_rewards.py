"""Format, regular expressions, language, length, exact match in normal form and F1."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.config.reward_sections import RegexSection, RewardFunction
from forge_core.rewards import RewardActor, RewardError, RewardItem
from forge_core.rewards.exact_match import ExactMatch
from forge_core.rewards.f1 import F1
from forge_core.rewards.format import FormatReward
from forge_core.rewards.language import LanguageReward, words_of
from forge_core.rewards.length import LengthReward
from forge_core.rewards.regex import RegexReward


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a</think>\n<answer>\nb\n</answer>\n", 1.0),
        ("<think>a < b and b > c</think><answer>x</answer>", 1.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>so<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> done", 0.0),
        ("Sure: <think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("</think>a<think><answer>b</answer>", 0.0),
        ("<THINK>a</THINK><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_is_the_blocks_in_order_once_each_and_nothing_else(completion: str, expected: float):
    assert FormatReward().grade("", completion, {}) == expected


def test_format_tags_are_a_setting_and_must_be_words():
    assert FormatReward(["reasoning", "verdict"]).grade("", "<reasoning>a</reasoning><verdict>b</verdict>", {}) == 1.0
    for tags in ([], ["a", "a"], ["<a>"]):
        with pytest.raises(ValueError, match="must be different words"):
            FormatReward(tags)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n"]), max_size=9))
def test_the_format_reward_agrees_with_a_regular_expression(parts: list[str]):
    text = "".join(parts)
    block = r"(?:(?!</?think>|</?answer>).)*?\S(?:(?!</?think>|</?answer>).)*?"
    expected = RegexReward(rf"<think>{block}</think>\s*<answer>{block}</answer>", whole=True).grade("", text, {})
    assert FormatReward().grade("", text, {}) == expected


def test_a_pattern_is_found_anywhere_or_is_the_whole():
    assert RegexReward(r"\d+").grade("", "a 12 b", {}) == 1.0
    assert RegexReward(r"\d+", whole=True).grade("", "a 12 b", {}) == 0.0
    assert RegexReward(r"a.b", whole=True).grade("", " a\nb ", {}) == 1.0
    assert [RegexReward("yes", ignore_case=case).grade("", "YES", {}) for case in (False, True)] == [0.0, 1.0]
    with pytest.raises(RewardError, match=r"'\(' is no regular expression: missing \)"):
        RewardActor([RewardFunction(path="regex", options={"pattern": "("})])


def test_a_pattern_that_takes_for_ever_costs_one_timeout():
    actor = RewardActor([RegexSection(name="regex", pattern=r"(a+)+$", timeout_s=0.5)], workers=1)
    try:
        graded = actor.grade_many([RewardItem("", text) for text in ("aaa", "a" * 60 + "b", "aa")])
    finally:
        actor.close()
    assert [g.reward for g in graded] == [1.0, None, 1.0]
    assert graded[1].status == "timeout"


ENGLISH = "Let x be the number of apples. Then $x = 3$, so we get \\boxed{3}."
GERMAN = "Die Antwort ist 42, weil die Summe der beiden Zahlen gerade ist."


@pytest.mark.parametrize(
    ("language", "completion", "expected"),
    [
        ("en", ENGLISH, 1.0),
        ("de", ENGLISH, 0.0),
        ("de", GERMAN, 1.0),
        ("en", GERMAN, 0.0),
        ("en", f"<think>{ENGLISH}</think>", 1.0),
        ("zh", "答案是四十二, 因为两个数的和是偶数", 1.0),
        ("en", "答案是四十二, 因为两个数的和是偶数", 0.0),
        ("de", f"```python\ndef and_so_on(the, answer): return the\n```\n{GERMAN}", 1.0),
        ("en", "42", 0.0),
        ("en", "$x^2$", 0.0),
        ("en", "", 0.0),
    ],
)
def test_the_language_of_the_words_decides(language: str, completion: str, expected: float):
    assert LanguageReward(language).grade("", completion, {}) == expected


def test_the_right_language_can_be_that_of_the_prompt():
    reward = LanguageReward(None)
    assert reward.grade("Wie viele Äpfel hat der Junge noch übrig?", GERMAN, {}) == 1.0
    assert reward.grade("Wie viele Äpfel hat der Junge noch übrig?", ENGLISH, {}) == 0.0


def test_the_probability_of_the_language_can_be_the_reward_and_languages_can_be_limited():
    text = "The answer is 42."
    free, limited = (LanguageReward("en", among, True).grade("", text, {}) for among in (None, ["en", "zh"]))
    assert 0.1 < free < limited <= 1.0


def test_unknown_languages_are_refused():
    with pytest.raises(RewardError, match="language 'xx' is not among"):
        RewardActor([RewardFunction(path="language", options={"language": "xx"})])
    with pytest.raises(RewardError, match="qq"):
        RewardActor([RewardFunction(path="language", options={"among": ["en", "qq"]})])


def test_what_is_no_language_is_left_aside():
    text = "See <b>this</b> `code` at https://example.org/a: $x$, \\(y\\), $$\nz\n$$ \\boxed{9} 12 ```\nx = 1\n``` end"
    assert words_of(text) == "See this at , , end"


@pytest.mark.parametrize(
    ("options", "length", "expected"),
    [
        ({"at_most": 10}, 10, 1.0),
        ({"at_most": 10}, 11, 0.0),
        ({"at_most": 10, "slack": 9}, 11, 0.9),
        ({"at_most": 10, "slack": 9}, 15, 0.5),
        ({"at_most": 10, "slack": 9}, 99, 0.0),
        ({"at_least": 5, "at_most": 10}, 5, 1.0),
        ({"at_least": 5, "at_most": 10, "slack": 4}, 4, 0.8),
        ({"at_least": 5}, 0, 0.0),
        ({"at_least": 5}, 10**6, 1.0),
    ],
)
def test_the_reward_falls_outside_of_the_wanted_length(options: dict[str, Any], length: int, expected: float):
    assert LengthReward(**options).grade("", "", {"response_tokens": length}) == pytest.approx(expected)
    assert LengthReward(**options, unit="words").grade("", "w " * length, {}) == pytest.approx(expected)
    assert LengthReward(**options, unit="characters").grade("", "c" * length, {}) == pytest.approx(expected)


def test_lengths_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="at_most=3 is below at_least=5"):
        LengthReward(5, 3)
    with pytest.raises(ValueError, match="must be one of tokens, words, characters"):
        LengthReward(unit="lines")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("the cat sat", "a cat sat down", 0.8),
        ("Cat!", "the cat", 1.0),
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1_counts_shared_words_in_normal_form(completion: str, answer: str, expected: float):
    assert F1().grade("", completion, {"answer": answer}) == pytest.approx(expected)


def test_exact_match_can_leave_case_punctuation_and_articles_aside():
    assert ExactMatch(normalize=True).grade("", "The  Eiffel Tower.", {"answer": "eiffel tower"}) == 1.0
    assert ExactMatch().grade("", "The  Eiffel Tower.", {"answer": "eiffel tower"}) == 0.0

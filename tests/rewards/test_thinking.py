"""The think-tag reward: the behaviours that the original's tests assert."""

from __future__ import annotations

import pytest

from forge_core.rewards.thinking import ThinkingReward

FULL = [
    "<think>reasons</think>",
    "<THINK>reasons</THINK>",
    "<Think>reasons</tHiNk> and an answer",
    "< think >reasons</ think >",
    "<\tthink\n>reasons<\n/think\t>",
    "<think><think>nested</think></think>",
    "<think>\nseveral\nlines\n</think>",
    "<think>one</think> then <think>two</think>",
    "<think></think> <think>the second has some</think>",
    "<think>数学 ∑ é</think>",
    f"<think>{'x' * 10_000}</think>",
]
PARTIAL = ["<think></think>", "<think> \n\t </think>", "<think>never closed", "never opened</think>", "</think><think>"]
NONE = ["", None, "no tags", "think about it", "<thinking>other</thinking>", "<thinker>"]


@pytest.mark.parametrize(
    ("completion", "share"), [(c, 1.0) for c in FULL] + [(c, 0.2) for c in PARTIAL] + [(c, 0.0) for c in NONE]
)
def test_a_whole_block_is_full_any_tag_partial_and_nothing_zero(completion: str | None, share: float):
    assert ThinkingReward().grade("", completion, {"answer": "ignored"}) == share


def test_both_values_are_settings_of_any_sign():
    reward = ThinkingReward(partial_reward=-0.3, full_reward=0.9)
    assert [reward.grade("", c, {}) for c in ("<think>a</think>", "<think>", "a")] == [0.9, -0.3, 0.0]
    assert ThinkingReward(0.0, 0.0).grade("", "<think>a</think>", {}) == 0.0

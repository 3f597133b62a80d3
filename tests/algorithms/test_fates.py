"""Advantages, and what becomes of every planned episode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_core.algorithms.advantages import (
    build_estimator,
    compares,
    group_advantages,
    has_signal,
    reinforce_plus_plus,
    whitens,
)
from forge_core.algorithms.fates import FateRules, PlannedGroup, StalenessError, decide_fates
from forge_core.config.algorithm_sections import AdvantageSection
from forge_core.data_model import Episode


def episode(episode_id: str, reward: float | None, version: int = 5) -> Episode:
    return Episode(
        episode_id,
        group_id=episode_id.rpartition("/")[0],
        sample_index=int(episode_id.rpartition("/")[2]),
        prompt_id="p",
        messages=[],
        prompt_ids=[1],
        response_ids=[2, 3],
        response_mask=[True, True],
        response_logprobs=[-1.0, -1.0],
        text="x",
        finish_reason="stop",
        policy_version=version,
        version_spans=[],
        target=None,
        task="t",
        metadata={},
        sampling={},
        created_at="",
        reward=reward,
    )


def fates(rewards: list[float | None], missing: int = 0, **kwargs: Any) -> list:
    ids = tuple(f"r/b/g/{i}" for i in range(len(rewards) + missing))
    episodes = {i: episode(i, r) for i, r in zip(ids, rewards, strict=False)}
    return decide_fates([PlannedGroup(ids)], episodes, 5, FateRules(max_staleness=1, **kwargs))


def test_advantages_are_the_group_z_score() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], eps=0.0) == pytest.approx(
        [0.8660254, -0.8660254, -0.8660254, 0.8660254]
    )
    assert group_advantages([1.0, 0.0], normalize=False) == [0.5, -0.5]


@pytest.mark.parametrize("value", [0.35, 0.1, 0.7, 1e6, -3.3])
def test_equal_rewards_give_exactly_zero_whatever_their_rounding(value: float) -> None:
    assert group_advantages([value] * 7) == [0.0] * 7
    assert not has_signal([value, value + abs(value) * 1e-12])


def test_one_rounding_error_is_not_blown_up() -> None:
    assert max(abs(a) for a in group_advantages([0.35] * 6 + [0.35 + 1e-15], eps=0.0)) == 0.0


def test_a_group_of_one_is_an_error_not_nan() -> None:
    with pytest.raises(ValueError, match="at least two"):
        group_advantages([1.0])


def test_null_rewards_are_dropped_and_do_not_poison_the_group() -> None:
    result = fates([1.0, None, 0.0, 0.0])
    assert [f.dropped for f in result] == [None, "grading_failed", None, None]
    assert [f.trained for f in result] == [True, False, True, True]
    expected = group_advantages([1.0, 0.0, 0.0])
    assert [f.advantage for f in result if f.trained] == expected


def test_a_group_left_with_one_reward_is_too_small() -> None:
    assert [f.dropped for f in fates([1.0, None])] == ["group_too_small", "grading_failed"]


def test_missing_episodes_are_dropped_by_deadline() -> None:
    assert [f.dropped for f in fates([1.0, 0.0], missing=2)] == [None, None, "deadline", "deadline"]


def test_groups_without_signal_keep_their_tokens_in_the_denominator() -> None:
    result = fates([1.0, 1.0])
    assert [(f.dropped, f.loss_tokens, f.advantage) for f in result] == [("zero_variance", 2, 0.0)] * 2


def test_an_entropy_bonus_reaches_groups_without_signal() -> None:
    result = fates([1.0, 1.0], explores=True)
    assert [(f.dropped, f.trained, f.loss_tokens, f.advantage) for f in result] == [(None, True, 2, 0.0)] * 2
    assert fates([1.0, 0.0], explores=True) == fates([1.0, 0.0])
    assert [f.dropped for f in fates([1.0, 1.0], explores=True, wanted=1)] == ["zero_variance"] * 2


def test_whitening_leaves_what_has_no_advantage_at_zero() -> None:
    groups, episodes = graded_groups([1.0, 1.0], [1.0, 0.0, 1.0])
    episodes["r/b/1/2"].finish_reason = "length"
    section = AdvantageSection(estimator="reinforce_plus_plus_baseline")
    rules = FateRules(1, build_estimator(section), None, "zero_advantage", whitens=True, explores=True)
    result = decide_fates(groups, episodes, 5, rules)
    assert all(f.trained for f in result)
    assert [f.advantage for f in result[:2]] == [0.0, 0.0], "a group without signal"
    assert result[4].advantage == 0.0, "a truncated response"
    first, second = (f.advantage for f in result[2:4])
    assert first == pytest.approx(-second), "the mean of the others alone"
    assert first > 0


def test_skipped_prompts_are_counted_with_their_reason() -> None:
    group = PlannedGroup(("a", "b"), "prompt_too_long")
    result = decide_fates([group], {}, 0, FateRules(0))
    assert [f.dropped for f in result] == ["prompt_too_long"] * 2


@pytest.mark.parametrize("version", [3, 6])
def test_an_episode_outside_the_bound_is_an_error(version: int) -> None:
    ids = ("r/b/g/0", "r/b/g/1")
    episodes = {i: episode(i, float(n), version) for n, i in enumerate(ids)}
    with pytest.raises(StalenessError, match=f"version {version}"):
        decide_fates([PlannedGroup(ids)], episodes, 5, FateRules(1))


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=8), st.integers(0, 3))
def test_every_planned_episode_is_trained_or_dropped_with_a_reason(rewards: list[float | None], missing: int) -> None:
    result = fates(rewards, missing)
    assert len(result) == len(rewards) + missing
    assert all(f.trained != (f.dropped is not None) for f in result)
    assert sum(f.advantage for f in result if f.trained) == pytest.approx(0, abs=1e-6)


def graded_groups(*groups: list[float]) -> tuple[list[PlannedGroup], dict[str, Episode]]:
    planned = [PlannedGroup(tuple(f"r/b/{g}/{i}" for i in range(len(rewards)))) for g, rewards in enumerate(groups)]
    rewards = {
        i: r for p, group in zip(planned, groups, strict=True) for i, r in zip(p.episode_ids, group, strict=True)
    }
    return planned, {i: episode(i, r) for i, r in rewards.items()}


def test_dynamic_sampling_takes_the_first_groups_with_signal_and_leaves_the_rest_out_of_the_denominators() -> None:
    groups, episodes = graded_groups([1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0])
    result = decide_fates(groups, episodes, 5, FateRules(1, wanted=2))
    assert [f.dropped for f in result[::2]] == ["zero_variance", None, "zero_variance", None, "surplus"]
    assert [f.loss_tokens for f in result[::2]] == [0, 2, 0, 2, 0]


@pytest.mark.parametrize(
    ("policy", "trained", "tokens"), [("keep", True, 2), ("mask", False, 0), ("zero_advantage", True, 2)]
)
def test_what_becomes_of_a_truncated_episode(policy: str, trained: bool, tokens: int) -> None:
    groups, episodes = graded_groups([1.0, 0.0, 0.0])
    cut = episodes["r/b/0/1"]
    cut.finish_reason = "length"
    whole, found, _ = decide_fates(groups, episodes, 5, FateRules(1, truncated=policy))
    assert (found.trained, found.loss_tokens) == (trained, tokens)
    assert found.dropped == (None if trained else "truncated")
    assert (found.advantage == 0.0) == (policy != "keep")
    assert whole.advantage == group_advantages([1.0, 0.0, 0.0])[0], "its reward stays in the group's statistics"


def test_a_masked_episode_counts_in_no_denominator_whatever_its_group() -> None:
    groups, episodes = graded_groups([0.0, 0.0], [1.0, 0.0])
    for name in ("r/b/0/0", "r/b/0/1"):
        episodes[name].finish_reason = "length"
    found = decide_fates(groups, episodes, 5, FateRules(1, truncated="mask"))
    assert [f.loss_tokens for f in found] == [0, 0, 2, 2]
    assert [f.dropped for f in found] == ["zero_variance", "zero_variance", None, None]
    found = decide_fates(groups, episodes, 5, FateRules(1, truncated="zero_advantage"))
    assert [f.loss_tokens for f in found] == [2, 2, 2, 2]


def test_reinforce_plus_plus_whitens_rewards_over_the_tokens_of_the_batch() -> None:
    groups, episodes = graded_groups([1.0, 1.0], [1.0, 0.0])
    episodes["r/b/1/1"].response_ids, episodes["r/b/1/1"].response_mask = [2, 3, 4], [True, True, True]
    section = AdvantageSection(estimator="reinforce_plus_plus")
    rules = FateRules(1, build_estimator(section), compares=compares(section), whitens=whitens(section))
    result = decide_fates(groups, episodes, 5, rules)
    assert all(f.trained for f in result), "nothing is compared within a group, so equal rewards still teach"
    rewards, mask = torch.tensor([1.0, 1.0, 1.0, 0.0]).double(), torch.ones(4, 3).double()
    mask[:3, 2] = 0
    expected, _ = reinforce_plus_plus(rewards, mask)
    assert [f.advantage for f in result] == pytest.approx(expected[:, 0].tolist(), abs=1e-9)


def test_its_baseline_form_subtracts_the_group_mean_first() -> None:
    groups, episodes = graded_groups([1.0, 1.0], [1.0, 0.0])
    section = AdvantageSection(estimator="reinforce_plus_plus_baseline")
    rules = FateRules(1, build_estimator(section), compares=compares(section), whitens=whitens(section))
    result = decide_fates(groups, episodes, 5, rules)
    assert [f.dropped for f in result] == ["zero_variance"] * 2 + [None] * 2
    expected, _ = reinforce_plus_plus(torch.tensor([0.5, -0.5]).double(), torch.ones(2, 2).double())
    assert [f.advantage for f in result if f.trained] == pytest.approx(expected[:, 0].tolist(), abs=1e-9)

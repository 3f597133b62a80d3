"""Bugs that other systems had in public, in losses, advantages and accounting: one test each, named by its number.

Bugs that another layer's tests cover are in ``ELSEWHERE``; a test checks that those tests exist. What is missing
concerns rewards, tools and services, which have tests of their own.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_core.algorithms.advantages import group_advantages, leave_one_out
from forge_core.algorithms.fates import FateRules, PlannedGroup, StalenessError, decide_fates
from forge_core.algorithms.losses import DAPOLoss, GRPOLoss
from forge_core.algorithms.ops import Totals, aggregate, compute_logprobs, compute_ratio
from forge_core.config import ConfigError, load_config, validate_for_training
from forge_core.data_model import Episode
from tests.algorithms.batches import EVERY_LOSS, evaluate, packed, random_rows

ROOT = Path(__file__).parents[2]

ELSEWHERE = {
    1: "tests/training/test_gradients.py::test_any_micro_batch_split_gives_the_same_gradient_loss_and_metrics",
    3: "tests/algorithms/test_fates.py::test_null_rewards_are_dropped_and_do_not_poison_the_group",
    6: "tests/training/test_packing.py::test_padding_never_counts",
    7: "tests/generation/test_sampling.py::test_log_probabilities_are_those_of_the_tempered_softmax",
    8: "tests/generation/test_hf_generator.py::test_truncated_sampling_stores_processed_log_probabilities_and_says_so",
    9: "tests/algorithms/test_in_a_run.py::test_on_policy_sampler_and_trainer_agree_step_after_step",
    10: "tests/flows/test_window.py::test_lag_never_exceeds_the_bound_and_every_shard_is_consumed_once",
    11: "tests/algorithms/test_fates.py::test_an_episode_outside_the_bound_is_an_error",
    12: "tests/flows/test_window.py::test_a_resumed_loop_starts_at_the_first_uncommitted_step",
    13: "tests/store/test_ledger.py::test_entries_that_do_not_add_up_are_refused",
    14: "tests/faults/test_kill_resume.py::test_a_killed_run_with_newest_weights_loses_and_repeats_nothing",
    15: "tests/runs/test_changes.py::test_a_resume_exactly_at_the_end_of_an_epoch_does_the_remaining_steps",
    16: "tests/runs/test_tiny_run.py::test_a_run_continued_by_another_process_equals_the_uninterrupted_one_bit_for_bit",
    18: "tests/runs/test_changes.py::test_a_batch_past_its_deadline_is_trained_with_what_there_is_and_not_waited_for",
    21: "tests/store/test_retention.py::test_the_two_newest_complete_checkpoints_of_the_chain_stay",
    25: "tests/training/test_gradients.py::"
    "test_packed_log_probabilities_equal_those_of_each_document_alone_in_transformers",
}


@pytest.mark.parametrize("bug", ELSEWHERE)
def test_the_tests_of_other_layers_exist(bug: int) -> None:
    file, name = ELSEWHERE[bug].split("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_bug_1_a_mean_per_micro_batch_is_not_the_mean() -> None:
    """100 tokens at 2.0 and 900 at 0.5 are 0.65 on average, not 1.25, however they are split."""
    parts = [torch.full((1, 100), 2.0), torch.full((1, 900), 0.5)]
    totals = Totals(1000, 2)
    shares = [aggregate(part, torch.ones_like(part), totals, "token_mean") for part in parts]
    assert sum(shares).item() == pytest.approx(0.65)


def test_bug_2_a_deviation_that_is_rounding_is_not_divided_by() -> None:
    """Seven equal rewards that are no binary fractions, and one more."""
    equal = [0.35] * 7
    assert group_advantages(equal, eps=0.0) == leave_one_out(equal) == [0.0] * 7
    almost = [*equal, math.nextafter(0.35, 1.0)]  # another rounding
    assert group_advantages(almost, eps=0.0) == leave_one_out(almost) == [0.0] * 8
    differing = group_advantages([*equal, 1.0], eps=0.0)
    assert max(map(abs, differing)) == pytest.approx(7 / math.sqrt(8))  # the largest z-score of eight values
    assert len(set(differing[:7])) == 1


def test_bug_3_a_group_with_one_reward_poisons_nothing() -> None:
    fates = fates_of([1.0, None, None], [0.0, 1.0, None])
    assert [f.dropped for f in fates[:3]] == ["group_too_small", "grading_failed", "grading_failed"]
    assert [f.trained for f in fates[3:]] == [True, True, False]
    assert all(math.isfinite(f.advantage) for f in fates)


def test_bug_4_a_group_without_signal_gets_no_gradient_also_not_of_the_penalty() -> None:
    """It is not computed, so beta cannot reach it; its tokens stay in the denominators, as documented."""
    without = fates_of([1.0, 1.0], [0.0, 1.0])
    assert [(f.trained, f.loss_tokens) for f in without[:2]] == [(False, 2), (False, 2)]
    replaced = fates_of([1.0, 1.0], [0.0, 1.0], wanted=1)
    assert [(f.trained, f.loss_tokens) for f in replaced[:2]] == [(False, 0), (False, 0)]


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_bug_5_a_batch_whose_tokens_are_all_masked_is_a_finite_zero_with_a_gradient(name: str) -> None:
    """A gradient of zeros and not none at all: collectives of several ranks stay in step."""
    rows = random_rows()
    rows.mask = torch.zeros_like(rows.mask)
    loss, gradient, _ = evaluate(EVERY_LOSS[name](), rows, [slice(0, 6)], Totals(0, 0, 5))
    assert loss == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_bug_6_padding_does_not_shrink_the_step(name: str) -> None:
    rows = random_rows()
    loss_fn = EVERY_LOSS[name]()
    expected, gradient, _ = evaluate(loss_fn, rows, [slice(0, 6)])
    rows.logprobs.grad = None
    total = 0.0
    for document in range(6):  # three positions of padding each
        logprobs, entropy, batch = packed(rows, [document])
        loss, _ = loss_fn.from_logprobs(logprobs, entropy, batch, rows.totals)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(rows.logprobs.grad, gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
def test_bug_7_the_ratio_is_one_on_policy_at_any_temperature(temperature: float) -> None:
    """Sampler and trainer divide logits by the temperature; dividing log-probabilities is something else."""
    g = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(2, 5, 9, generator=g), torch.randint(0, 9, (2, 5), generator=g)
    sampler = torch.log_softmax(logits / temperature, -1).gather(-1, ids[..., None])[..., 0]
    mine = compute_logprobs(logits, ids, temperature)
    ratio = compute_ratio(mine, sampler, torch.ones(2, 5))
    torch.testing.assert_close(ratio, torch.ones(2, 5))
    if temperature != 1.0:
        wrong = compute_ratio(compute_logprobs(logits, ids) / temperature, sampler, torch.ones(2, 5))
        assert (wrong - 1).abs().max() > 0.1


@pytest.mark.parametrize("setting", ["rollout.top_p=0.9", "rollout.top_k=50", "rollout.min_p=0.05"])
def test_bug_8_truncated_sampling_is_refused_unless_accepted(setting: str) -> None:
    config = load_config({}, [setting])
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        validate_for_training(config)


@given(st.integers(0, 5), st.integers(0, 12), st.integers(0, 12))
def test_bug_10_staleness_counts_training_steps_once(bound: int, version: int, batch: int) -> None:
    """Against a model: a batch may be sampled by any version that existed within ``bound`` steps of training on it."""
    versions = [v for v in range(batch + 1) if len(range(v, batch)) <= bound]
    rules = FateRules(bound)
    episodes = {e.episode_id: e for e in (episode(i, float(i), version) for i in range(2))}
    group = [PlannedGroup(tuple(episodes))]
    if version in versions:
        assert [f.age for f in decide_fates(group, episodes, batch, rules)] == [batch - version] * 2
    else:
        with pytest.raises(StalenessError):
            decide_fates(group, episodes, batch, rules)


def test_bug_11_the_bound_holds_when_an_episode_is_consumed_however_long_it_waited() -> None:
    waited = {e.episode_id: e for e in (episode(i, float(i), version=3) for i in range(2))}
    group = [PlannedGroup(tuple(waited))]
    assert len(decide_fates(group, waited, 4, FateRules(1))) == 2
    with pytest.raises(StalenessError, match="training step 5 accepts versions 4 to 5"):
        decide_fates(group, waited, 5, FateRules(1))


@given(st.lists(st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.35, 1.0])), min_size=1, max_size=4), max_size=5))
def test_bug_13_every_episode_is_trained_or_dropped_once_and_only_what_counts_has_tokens(groups: list) -> None:
    fates = fates_of(*groups)
    assert len(fates) == sum(map(len, groups))
    assert len({f.episode_id for f in fates}) == len(fates)
    assert all(f.trained == (f.dropped is None) for f in fates)
    assert all((f.loss_tokens > 0) == (f.trained or f.dropped == "zero_variance") for f in fates)


def test_bug_25_a_neighbour_in_the_same_row_changes_nothing() -> None:
    """In the loss; the model's side of it is tested with the trainer."""
    rows = random_rows()
    loss_fn = GRPOLoss(beta=0.05, agg_type="sequence_mean")
    gradients = []
    for neighbour in (1, 2):
        rows.logprobs.grad = None
        logprobs, entropy, batch = packed(rows, [0, neighbour])
        loss_fn.from_logprobs(logprobs, entropy, batch, rows.totals)[0].backward()
        gradients.append(rows.logprobs.grad[0].clone())
    assert torch.equal(*gradients)


def test_a_penalty_controller_does_not_lose_its_state_in_a_checkpoint() -> None:
    """The like of bugs 14 to 16 for what a loss adapts."""
    loss_fn = DAPOLoss(beta=0.1, adaptive_kl=True)
    loss_fn.after_step({"kl": 3.0})
    resumed = DAPOLoss(beta=0.1, adaptive_kl=True)
    resumed.load_state(loss_fn.state())
    assert resumed.after_step({"kl": 0.1}) == loss_fn.after_step({"kl": 0.1})


def episode(number: int, reward: float | None, version: int = 0, group: int = 0) -> Episode:
    name, logprobs, mask = f"r/0/{group}/{number}", [-1.0, -1.0], [True, True]
    return Episode(
        name, "g", number, "p", [], [1], [2, 3], mask, logprobs, "x", "stop", version, [], None, "t", {}, {}, "", reward
    )


def fates_of(*groups: list[float | None], wanted: int | None = None) -> list:
    episodes, planned = {}, []
    for index, rewards in enumerate(groups):
        members = [episode(i, reward, group=index) for i, reward in enumerate(rewards)]
        episodes |= {e.episode_id: e for e in members}
        planned.append(PlannedGroup(tuple(e.episode_id for e in members)))
    return decide_fates(planned, episodes, 0, FateRules(0, wanted=wanted))

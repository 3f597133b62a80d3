"""Losses in training steps of a real small run: corrections, adaptive penalties, alarms, a user's own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_core.algorithms.losses import LOSSES
from forge_core.data_model import VersionSpan
from forge_core.runs.consumption import load_step
from forge_core.runs.context import RunContext
from forge_core.runs.initialise import initialise
from tests.runs.harness import advance, decided, make_batch, new_run, reopened
from tests.sft.teachers import teacher

pytestmark = pytest.mark.engine

SEVERAL_STEPS = ("training.sync_interval=2", "training.epochs_per_batch=2")
MISMATCH = "mismatch/mean_abs_logprob"


def run(*overrides: str, steps: int = 1) -> RunContext:
    return advance(new_run("memory://algorithms-" + str(hash(overrides)), *overrides), steps)


def metrics(ctx: RunContext) -> list[dict[str, float]]:
    return [entry["metrics"] for entry in ctx.ledger.entries()]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_trains(name: str, tmp_path: Path) -> None:
    taught = ("grpo.beta=1.0", f"loss.teacher={teacher(tmp_path)}") if name == "distill" else ()
    ctx = run(f"loss.name={name}", *taught)
    [found] = metrics(ctx)
    assert found["grad_norm"] > 0
    assert found["mismatch/effective_samples"] == pytest.approx(1.0, abs=1e-3)
    ctx.close()


def test_on_policy_sampler_and_trainer_agree_step_after_step() -> None:
    """Bug 9: a gap that grows although each batch is sampled by the policy that trains on it."""
    ctx = run("training.learning_rate=1e-3", steps=4)
    assert all(found["mismatch/max_abs_logprob"] < 1e-4 for found in metrics(ctx))
    ctx.close()


def test_the_proximal_policy_is_the_one_that_the_training_step_starts_from() -> None:
    """With several optimizer steps, the first of them sees ratio 1 and all see the same weights."""
    correction = "loss.correction={name: truncated, high: 2.0}"
    ctx = run(correction, *SEVERAL_STEPS, "training.learning_rate=3e-2")
    seen: list[dict[str, Any]] = []
    loss = ctx.trainer._loss
    finish = loss.finish
    loss.finish = lambda found: seen.append(dict(found)) or finish(found)  # type: ignore[method-assign]
    advance(ctx, 2)
    ratios = [finish(found)["ratio/mean"] for found in seen]
    assert len(seen) == 4
    assert ratios[0] == 1.0
    assert all(ratio != 1.0 for ratio in ratios[1:])
    for found in seen:  # sampler and start of the step are one policy, on-policy
        assert finish(found)["correction/weight"] == pytest.approx(1.0, abs=1e-4)
        assert finish(found)["mismatch/max_abs_logprob"] < 1e-4
    ctx.close()


def test_a_single_optimizer_step_needs_no_further_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_core.training.stored import StoredTrainer

    monkeypatch.setattr(StoredTrainer, "logprobs_samples", None)
    ctx = run("loss.correction={name: icepop}")
    assert metrics(ctx)[0]["ratio/mean"] == 1.0
    ctx.close()


def test_a_run_with_a_correction_and_an_adaptive_penalty_is_replayed_bit_for_bit() -> None:
    loss = "loss={name: dapo, adaptive_kl: true, kl_target: 0.01, correction: {name: icepop}}"
    overrides = (loss, "grpo.beta=0.05", *SEVERAL_STEPS, "checkpoint.interval=2", "max_staleness=1")
    whole = run(*overrides, steps=4)
    betas = [found["kl/beta"] for found in metrics(whole)]
    assert len(set(betas)) == 4
    broken = advance(new_run("memory://algorithms-broken", *overrides), 3)  # a checkpoint after step 1, then one more
    broken.close()
    again = advance(reopened(broken), 4)
    assert decided(again) == decided(whole)
    whole.close()
    again.close()


@pytest.mark.parametrize(("limit", "warned"), [("1e-12", True), ("0.5", False)])
def test_the_alarm_warns_of_a_mismatch_above_its_threshold(limit: str, warned: bool) -> None:
    ctx = new_run(f"memory://alarm-{warned}", f"loss.mismatch_alarm={limit}")
    notes: list[str] = []
    ctx.note = notes.append
    advance(ctx, 1)
    assert [note.startswith("training step 0: log-probabilities of sampler and trainer") for note in notes] == (
        [True] if warned else []
    )
    ctx.close()


@pytest.mark.parametrize(("swaps", "warned"), [("all", False), ("one", True)])
def test_the_alarm_does_not_count_responses_during_which_the_weights_changed(swaps: str, warned: bool) -> None:
    ctx = new_run(f"memory://alarm-{swaps}", "loss.mismatch_alarm=1e-12")
    initialise(ctx)
    make_batch(ctx, 0)
    data = load_step(ctx, 0)
    episodes = data.generated if swaps == "all" else data.generated[:1]
    for episode in episodes:
        episode.version_spans = [VersionSpan(0, 0, 1), VersionSpan(1, 1, len(episode.response_ids))]
    notes: list[str] = []
    ctx.note = notes.append
    found = ctx.trainer.learn(data).metrics
    assert 0.0 < found[MISMATCH] < 1e-4
    assert ("mismatch/one_version_mean_abs_logprob" in found) == warned == bool(notes)
    ctx.close()


def test_a_loss_in_the_users_own_file_trains(tmp_path: Path) -> None:
    file = tmp_path / "my_loss.py"
    file.write_text(
        "from torch import nn\n"
        "from forge_core.algorithms.losses import GRPOLoss\n"
        "class CustomLoss(nn.Module):\n"
        "    def forward(self, logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs):\n"
        "        loss = GRPOLoss(beta=0.0, agg_type='token_mean')\n"
        "        return loss(logits, target_ids, advantages, generator_logprobs, loss_mask)[0], {}\n"
    )
    own = run(f"loss={{name: custom, path: '{file}:CustomLoss'}}")
    built_in = run("loss={name: grpo, agg_type: token_mean}")
    assert f"loss {file}:CustomLoss" in own.record.code
    assert "entropy" in metrics(built_in)[0]
    assert not {"entropy", "kl"} & metrics(own)[0].keys(), "what the loss does not measure is not made up"
    assert metrics(own)[0]["grad_norm"] == pytest.approx(metrics(built_in)[0]["grad_norm"], rel=1e-4)
    own.close()
    built_in.close()

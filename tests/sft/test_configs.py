"""The configurations of supervised runs, and the recipes for eight GPUs: they load, pass the gate, and fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_core.config import ConfigError, load_config
from forge_core.config.sft_loader import load_sft_config, sft_warnings, validate_for_sft
from forge_core.data.loader import check_sft_data
from forge_core.devices import alone, gpus_wanted, place, place_trainer
from forge_core.runs.memory_estimate import GIB, USABLE, roles_memory
from forge_core.runs.model_shape import model_shape
from forge_core.runs.sft_checks import check_sft
from forge_core.runs.sft_estimate import sft_memory, trained_parameters
from forge_core.training.degrees import Shape, degree_problems

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(CONFIGS.glob("sft_*.yaml"))
EIGHT = {str(index): 80 * GIB for index in range(8)}
# What the models' own config.json say.
SHAPES: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "model_type": "llama"},
    },
    "qwen3_1_7b": {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True, "model_type": "qwen3"},
    },
    "qwen3_8b": {
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": False, "model_type": "qwen3"},
    },
    "qwen3_32b": {
        **{"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
        **{"num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": False, "model_type": "qwen3"},
    },
}


def model_folder(folder: Path, name: str) -> Path:
    """A folder that looks like the model, with files of no bytes instead of its weights."""
    architecture = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[SHAPES[name]["model_type"]]
    (folder / "config.json").write_text(json.dumps({"head_dim": 128, "architectures": [architecture], **SHAPES[name]}))
    for file in ("model.safetensors", "tokenizer.json"):
        (folder / file).write_bytes(b"")
    return folder


def can_be_divided(name: str, tensor: int, pipeline: int) -> bool:
    sizes = SHAPES[name]
    keys = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")
    return not degree_problems(Shape(*(sizes[key] for key in keys), sizes["tie_word_embeddings"]), tensor, pipeline)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_it_passes_the_gate_for_eight_gpus_without_a_warning(file: Path):
    config = load_sft_config(file)
    assert validate_for_sft(config, gpus=8) == []
    assert sft_warnings(config) == []
    assert f"forge sft configs/{file.name}" in file.read_text()


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_8b"])
def test_the_supervised_recipes_put_a_rank_on_each_of_eight_gpus_of_80_gib_and_fit(name: str, tmp_path: Path):
    config = load_sft_config(CONFIGS / f"sft_{name}.yaml", [f"model={model_folder(tmp_path, name)}"])
    placement = place_trainer(config, tuple(EIGHT))
    assert placement.trainer == tuple(EIGHT)
    p = config.parallelism
    assert can_be_divided(name, p.tensor_parallel_degree, p.pipeline_parallel_degree)
    assert sft_memory(config, model_shape(config), placement, EIGHT).total < USABLE * 80 * GIB


@pytest.mark.parametrize("name", ["qwen3_1_7b", "qwen3_8b"])
def test_the_grpo_recipes_for_one_box_place_every_role_on_gpus_of_its_own_and_fit(name: str, tmp_path: Path):
    config = load_config(CONFIGS / f"grpo_{name}.yaml", [f"model={model_folder(tmp_path, name)}"])
    placement = place(config, tuple(EIGHT))
    used = [gpu for replica in placement.generator for gpu in replica] + [*placement.trainer, *placement.reference]
    assert len(used) == len(set(used)) == sum(gpus_wanted(config).values()) <= 8
    assert all(role.total < USABLE * 80 * GIB for role in roles_memory(config, model_shape(config), placement, EIGHT))


def test_each_role_of_the_largest_recipe_fits_a_box_of_eight_gpus(tmp_path: Path):
    config = load_config(CONFIGS / "grpo_qwen3_32b.yaml", [f"model={model_folder(tmp_path, 'qwen3_32b')}"])
    assert can_be_divided("qwen3_32b", config.parallelism.tensor_parallel_degree, 1)
    for role, count in {"generator": 8, "trainer": 8, "reference": 1}.items():
        own = alone(config, role)
        placement = place(own, tuple(EIGHT))
        found = [r for r in roles_memory(own, model_shape(own), placement, EIGHT) if r.role.startswith(role)]
        assert [(len(r.gpus), r.total < USABLE * 80 * GIB) for r in found] == [(count, True)], role


def test_too_few_gpus_are_answered_with_what_to_change():
    with pytest.raises(ConfigError, match=r"8 are wanted .* has 4: .*data_parallel_shard_degree=4"):
        validate_for_sft(load_sft_config(CONFIGS / "sft_qwen3_8b.yaml"), gpus=4)


def test_the_quickstart_can_start_anywhere():
    assert check_sft(load_sft_config(CONFIGS / "sft_quickstart.yaml")) == []


def test_the_data_of_smollm2_are_its_own_tasks():
    config = load_sft_config(CONFIGS / "sft_smollm2.yaml")
    assert config.dataset is not None
    check_sft_data(config.dataset)


def test_adapters_train_a_hundredth_of_the_model_and_take_less_memory(tmp_path: Path):
    whole = load_sft_config(CONFIGS / "sft_qwen3_8b.yaml", [f"model={model_folder(tmp_path, 'qwen3_8b')}"])
    adapted = load_sft_config(whole, ["lora.rank=16"])
    shape, placement = model_shape(whole), place_trainer(whole, tuple(EIGHT))
    assert trained_parameters(adapted, shape) < 0.01 * trained_parameters(whole, shape)
    sizes = [sft_memory(config, shape, placement, EIGHT).parts for config in (whole, adapted)]
    assert sizes[1]["optimizer"] < 0.01 * sizes[0]["optimizer"]


BAD = {
    "training.batch_size=6 parallelism.data_parallel_shard_degree=4": r"batch_size: 6 .*training\.batch_size=8",
    "training.token_budget=16 training.seq_len=32": r"training\.token_budget: is 16, less than training\.seq_len 32",
    "lora.rank=4 parallelism.tensor_parallel_degree=2": r"parallelism\.tensor_parallel_degree: is 2, but adapters",
    "~model": r"model: is missing",
    "~dataset": r"dataset: is missing",
    "training.seq_len=64": r"model\.max_position_embeddings: is 32, less than training\.seq_len 64",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_answered_by_key_before_anything_is_loaded(words: str):
    with pytest.raises(ConfigError, match=BAD[words]):
        validate_for_sft(load_sft_config(CONFIGS / "sft_quickstart.yaml", words.split()), gpus=0)

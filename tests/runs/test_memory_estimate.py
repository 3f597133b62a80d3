"""What ``forge config --estimate`` says about memory, against what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_core.config import RunConfig, load_config
from forge_core.devices import place
from forge_core.runs.memory_estimate import (
    CONTEXT,
    GIB,
    PARTS,
    PROCESS,
    DeviceFit,
    RoleMemory,
    activation_bytes,
    fits,
    roles_memory,
    trainer_parts,
)
from forge_core.runs.model_shape import ModelShape, model_shape

QWEN3_600M = ModelShape(
    hidden=1024, feed_forward=3072, layers=28, queries=2048, keys=1024, vocabulary=151936, tied=True, qk_norm=True
)
MACHINE = 64 * GIB


def configured(*overrides: str) -> RunConfig:
    base = {"training": {"dtype": "bfloat16"}, "generator": {"backend": "vllm", "dtype": "bfloat16"}}
    return load_config(base, ["training.batch_size=512", *overrides])


def estimated(config: RunConfig, gpus: int, memory: int = 80) -> tuple[dict[str, RoleMemory], list[DeviceFit]]:
    sizes = {str(index): memory * GIB for index in range(gpus)}
    roles = roles_memory(config, QWEN3_600M, place(config, tuple(sizes)), sizes)
    return {role.role.split(",")[0]: role for role in roles}, fits(config, roles, sizes, MACHINE)


def test_activation_checkpointing_saves_what_was_measured_on_a_gpu():
    """Qwen3-0.6B, 16,384 tokens, bf16: the peak was 57.7 GiB without and 38.8 GiB with full checkpointing."""
    none, selective, full = (
        trainer_parts(configured(f"training.activation_checkpointing={ac}"), QWEN3_600M, 80 * GIB)["activations"]
        for ac in ("none", "selective", "full")
    )
    assert none - full == pytest.approx((57.7 - 38.8) * GIB, rel=0.15)
    assert none > 2 * selective > 4 * full


def test_the_state_of_the_trainer_is_sixteen_bytes_a_parameter_divided_among_the_ranks():
    names = ("parameters", "gradients", "optimizer")
    one = trainer_parts(configured(), QWEN3_600M, 80 * GIB)
    assert sum(one[name] for name in names) == 16 * QWEN3_600M.parameters
    degrees = "parallelism={data_parallel_shard_degree: 2, tensor_parallel_degree: 2, pipeline_parallel_degree: 2}"
    eight = trainer_parts(configured(degrees), QWEN3_600M, 80 * GIB)
    layers = QWEN3_600M.layers // 2 * QWEN3_600M.layer_parameters
    assert sum(eight[name] for name in names) == 16 * (layers + QWEN3_600M.matrix) // 4


@pytest.mark.parametrize("gpus", [0, 3])
def test_a_trainer_in_a_process_of_its_own_takes_that_process_too(gpus: int):
    (_, inside), (_, apart) = (estimated(configured(*more), gpus) for more in ((), ("training.own_process=true",)))
    assert apart[-1].device == "memory"
    assert apart[-1].needed - inside[-1].needed == PROCESS


def test_an_engine_takes_its_share_of_the_gpu_and_leaves_the_rest():
    roles, found = estimated(configured("generator.engine_args.gpu_memory_utilization=0.5"), 3)
    assert roles["generator"].total == pytest.approx(40 * GIB, rel=1e-6)
    assert [fit.device for fit in found] == ["0", "1", "2", "memory"]
    assert all(fit.fits for fit in found)


def test_engines_that_share_a_gpu_are_added_up():
    two = ("generator.engines_per_gpu=2", "generator.engine_args.gpu_memory_utilization=0.25")
    (one, _), (both, _) = estimated(configured(), 3), estimated(configured(*two), 3)
    assert both["generator"].total == pytest.approx(40 * GIB, rel=1e-6)
    assert both["generator"].parts["parameters"] == 2 * one["generator"].parts["parameters"]


def test_a_cache_whose_size_is_stated_has_that_size():
    stated = "generator.engine_args.kv_cache_memory_bytes=4000000000"
    (one, _), (all_of_it, _) = estimated(configured(stated), 3), estimated(configured(), 3)
    assert one["generator"].parts["KV cache"] == 4_000_000_000
    assert one["generator"].parts["parameters"] == all_of_it["generator"].parts["parameters"]
    (two, _) = estimated(configured(stated, "generator.engines_per_gpu=2"), 3)
    assert two["generator"].parts["KV cache"] == 8_000_000_000


def test_roles_that_take_turns_on_a_gpu_need_the_larger_and_roles_that_split_it_the_sum():
    turns, split = (estimated(configured(f"generator.sharing={way}", "grpo.beta=0"), 1) for way in ("sleep", "split"))
    roles = turns[0]
    assert split[1][0].needed == roles["generator"].total + roles["trainer"].total
    assert turns[1][0].needed == max(
        roles["generator"].total + roles["trainer"].asleep, CONTEXT + roles["trainer"].total
    )


def test_what_does_not_fit_names_the_settings_of_the_roles_that_are_there():
    _, found = estimated(configured("training.token_budget=65536"), 2, memory=40)
    generator, trainer, _ = found
    assert generator.fits
    assert not trainer.fits
    assert "training.activation_checkpointing=full" in trainer.settings
    assert "services.ref_model.with_gpus=false" in trainer.settings
    assert not any("gpu_memory_utilization" in setting for setting in trainer.settings)
    roles, found = estimated(configured("training.token_budget=65536", "training.activation_checkpointing=full"), 2, 40)
    assert found[1].fits, roles


def test_every_part_has_a_column():
    for overrides in ([], ["generator.backend=hf"], ["services.generator.with_gpus=false"]):
        for gpus in (0, 2):
            roles, _ = estimated(configured(*overrides), gpus)
            assert {part for role in roles.values() for part in role.parts} <= set(PARTS)


@pytest.mark.engine
def test_the_backward_pass_keeps_what_is_estimated(tmp_path: Path):
    """Every tensor that autograd saves in a training step of a small model on the CPU."""
    import torch

    from forge_core.models.scratch import create
    from forge_core.training.packing import PAD_ID, pack
    from forge_core.training.settings import TrainerSettings
    from forge_core.training.trainer import TitanTrainer
    from tests.runs.peak_memory import document, loss_of

    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_layers": 4, "num_heads": 3, "num_kv_heads": 1}
    model = {**sizes, "head_dim": 64, "vocabulary": "0123456789", "max_position_embeddings": 128}
    overrides = ["training.seq_len=128", "training.token_budget=512", "rollout.max_new_tokens=32"]
    config = load_config({"model": model}, overrides)
    create(config.model, 0, tmp_path)
    trainer = TitanTrainer(tmp_path, TrainerSettings.from_config(config), loss_of(config))
    trainer.setup()
    saved: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batches = pack([document(128)] * 4, 512, PAD_ID, 128)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.forward_backward(batches)
    parameters = {p.untyped_storage().data_ptr() for p in trainer._model.parameters()}
    measured = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in parameters)
    positions = sum(batch.input_ids.numel() for batch in batches)
    assert measured / positions == pytest.approx(activation_bytes(config, model_shape(config), True), rel=0.05)


@pytest.mark.engine
def test_peaks_of_a_tiny_and_a_50_million_model_are_within_a_factor_of_one_and_a_half(tmp_path: Path):
    command = [sys.executable, "-m", "tests.runs.peak_memory", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for measured, estimate in json.loads(done.stdout):
        assert 1 / 1.5 < measured / estimate < 1.5

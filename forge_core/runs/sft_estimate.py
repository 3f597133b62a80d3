"""How much memory the trainer of a supervised run takes: that of a GRPO run's trainer (``memory_estimate.py``), less
what adapters spare: gradients and moments of the weights that are not trained, and a second copy of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from forge_core.config.sft_config import SftConfig
from forge_core.devices import Placement
from forge_core.runs.memory_estimate import FLOAT32, RoleMemory, trainer_memory
from forge_core.runs.model_shape import ModelShape

WIDTH = {"float32": 4, "bfloat16": 2}


def sft_memory(config: SftConfig, shape: ModelShape, placement: Placement, gpu_memory: Mapping[str, int]) -> RoleMemory:
    """One rank of the trainer."""
    role = trainer_memory(config, shape, placement, gpu_memory)
    if config.lora is None:
        return role
    shards, trained = config.parallelism.data_parallel_shard_degree, trained_parameters(config, shape)
    frozen = FLOAT32 if shards > 1 else WIDTH[config.training.dtype]  # FSDP keeps its shards in float32
    parts = {
        **role.parts,
        "parameters": (frozen * shape.parameters + FLOAT32 * trained) // shards,
        "gradients": FLOAT32 * trained // shards,
        "optimizer": 2 * FLOAT32 * trained // shards,
    }
    return dataclasses.replace(role, parts=parts if shards > 1 else {**parts, "gathered": 0})


def trained_parameters(config: SftConfig, shape: ModelShape) -> int:
    """Parameters that get gradients."""
    if config.lora is None:
        return shape.parameters
    inputs_and_outputs = {
        "q_proj": shape.hidden + shape.queries,
        "k_proj": shape.hidden + shape.keys,
        "v_proj": shape.hidden + shape.keys,
        "o_proj": shape.queries + shape.hidden,
        "gate_proj": shape.hidden + shape.feed_forward,
        "up_proj": shape.hidden + shape.feed_forward,
        "down_proj": shape.feed_forward + shape.hidden,
    }
    return shape.layers * config.lora.rank * sum(inputs_and_outputs[name] for name in config.lora.targets)


def stored_weights(config: SftConfig, shape: ModelShape) -> int:
    """Bytes of one published version."""
    return WIDTH[config.weights_dtype] * shape.parameters

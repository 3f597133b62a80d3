"""How the model is spread over the ranks of a process group, by torchtitan's code (0.3.0).

Guarantees:
- One code path for one rank and for many: ``build_model`` shards over the mesh of the current process group. A launcher
  that wants several ranks initializes the group first; otherwise the process is a group of one that opens no port.
- The mesh is pipeline x data x tensor parallel (the last varies fastest with the rank). Data parallelism is FSDP2:
  parameters, gradients and optimizer state are sharded; float32 master weights, gradients reduced in float32.
- Losses divide by global counts, so gradients of ranks are added and never averaged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn

from forge_core.training.architecture import Architecture
from forge_core.training.degrees import DATA, PIPELINE, TENSOR, Shape, degree_problems
from forge_core.training.float8 import check_float8, with_float8
from forge_core.training.hf_export import Writers
from forge_core.training.lora import with_lora
from forge_core.training.packing import round_up
from forge_core.training.pipeline import Pipeline, stage_layers
from forge_core.training.settings import TrainerSettings
from forge_core.training.titan_compat import PolicyModel, model_config  # first: it prepares torchtitan's import

import torchtitan.distributed.parallel_dims as titan_dims  # isort: skip
from torchtitan.config import ParallelismConfig  # isort: skip
from torchtitan.distributed import ParallelDims, utils as dist_utils  # isort: skip
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # isort: skip
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder  # isort: skip
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config  # isort: skip

# gathering a parameter that two axes divide takes two steps, which it warns of each time
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
_BACKEND = "partial_dtensor"  # torchtitan's default needs a torch newer than 2.13


@dataclass(frozen=True)
class Mesh:
    """This rank's place. ``dims`` is None for one rank that shards nothing."""

    dims: ParallelDims | None = None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks along ``axis`` (pp, batch or tp); None where there is only this one."""
        mesh = None if self.dims is None else self.dims.get_optional_mesh(axis)
        return None if mesh is None else mesh.get_group()

    @property
    def data_rank(self) -> int:
        group = self.group("batch")
        return 0 if group is None else dist.get_rank(group)

    def pipeline(self, width: int, dtype: torch.dtype, device: torch.device, timeout_s: float) -> Pipeline | None:
        """The stages that micro-batches go through; None where there is only this one."""
        group = self.group("pp")
        if self.dims is None or group is None:
            return None
        return Pipeline(group, width, dtype, device, timeout_s, self.dims.get_optional_mesh("tp"))

    @property
    def writers(self) -> Writers:
        """This rank's part in an export."""
        ranks = 1 if self.dims is None else self.dims.dp_shard * self.dims.tp
        return Writers(dist.get_rank() % ranks, ranks, self.group("pp"), dist.get_rank() == 0)


def ensure_process_group() -> None:
    """Join the process group that a launcher made, or make a group of one process that needs no port."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dist_utils.set_spmd_backend(_BACKEND)


def build_model(arch: Architecture, settings: TrainerSettings, device: torch.device) -> tuple[PolicyModel, Mesh]:
    """A trainable model without weights: parameters are float32 (sharded over the ranks) and uninitialized; on one rank
    those that are not trained are of the compute type from the start, and never on the device in float32.

    With several ranks and the compute type bfloat16, FSDP keeps float32 master weights and casts them for forward and
    backward. One rank has nothing to gather and runs without FSDP (see ``masters.py``).
    Raises ValueError, naming the key, when the process group has another size than the degrees of ``settings`` give, or
    when the model or the device do not allow what ``settings`` ask for.
    """
    ensure_process_group()
    _check_degrees(arch, settings)
    config = model_config(arch, settings.row_positions)
    if settings.float8:
        check_float8(device)
        config = with_float8(config)
    if settings.lora is not None:
        config = with_lora(config, settings.lora)
    parallelism = _parallelism(settings)
    set_qwen3_sharding_config(config, enable_sp=parallelism.enable_sequence_parallel, enable_ep=False)
    with torch.device("meta"):
        model = config.build()
    mesh = Mesh()
    if settings.ranks > 1:
        mesh = Mesh(_dimensions(parallelism, device))
    _keep_stage(model, mesh)
    _divide(model, mesh, settings)
    _wrap_layers(model, mesh, settings)
    if mesh.dims is not None:
        _shard(model, mesh.dims, device, getattr(torch, settings.dtype))
        _set_timeouts(mesh.dims, settings.timeout_s)
    else:
        _narrow((p for p in model.parameters() if not p.requires_grad), getattr(torch, settings.dtype))
    return _materialize(model, device), mesh


def build_frozen(
    arch: Architecture, seq_len: int, device: torch.device, dtype: torch.dtype, *, compiled: bool = False
) -> PolicyModel:
    """A model without weights for inference in one process: parameters are ``dtype`` and need no gradient."""
    ensure_process_group()
    config = model_config(arch, round_up(seq_len))
    with torch.device("meta"):
        model = config.build()
    model.requires_grad_(False)
    _narrow(model.parameters(), dtype)
    if compiled:
        _compile(model)
    return _materialize(model, device)


def sharded(model: PolicyModel) -> list[fsdp.FSDPModule]:
    """The parts of the model that FSDP divides. Each must be resharded (``reshard``) before anybody reads or writes
    parameters.

    After a forward pass without backward FSDP leaves gathered copies in place of the last layers' parameters: reading
    them would give compute-type values, and writing past them would leave the next forward pass with old weights.
    """
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


@contextmanager
def uncompiled(model: PolicyModel) -> Iterator[None]:
    """Run the model's layers as they are written: for a shape that is not worth compiling for."""
    compiled = [(layer, layer._compiled_call_impl) for layer in model.layers.values()]
    for layer, _ in compiled:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in compiled:
            layer._compiled_call_impl = call


def _check_degrees(arch: Architecture, settings: TrainerSettings) -> None:
    shape = Shape(arch.n_heads, arch.n_kv_heads, arch.hidden_dim, arch.n_layers, arch.tied)
    problems = degree_problems(shape, settings.tensor_parallel, settings.pipeline_parallel)
    if problems:
        raise ValueError("; ".join(problems))
    if dist.get_world_size() != settings.ranks:
        raise ValueError(
            f"{PIPELINE} {settings.pipeline_parallel} x {DATA} {settings.data_parallel} x {TENSOR} "
            f"{settings.tensor_parallel} are {settings.ranks} ranks, but the trainer's process group has "
            f"{dist.get_world_size()}"
        )


def _parallelism(settings: TrainerSettings) -> ParallelismConfig:
    return ParallelismConfig(
        data_parallel_shard_degree=settings.data_parallel,
        tensor_parallel_degree=settings.tensor_parallel,
        pipeline_parallel_degree=settings.pipeline_parallel,
        spmd_backend=_BACKEND,
    )


def _dimensions(parallelism: ParallelismConfig, device: torch.device) -> ParallelDims:
    titan_dims.device_type = device.type  # a mesh of this device's kind, whatever else the machine has
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    return dims


def _keep_stage(model: PolicyModel, mesh: Mesh) -> None:
    """Pipeline parallelism: drop what other stages compute."""
    group = mesh.group("pp")
    if group is None:
        return
    stage, stages = dist.get_rank(group), dist.get_world_size(group)
    kept = stage_layers(len(model.layers), stage, stages)
    for name in [name for name in model.layers if int(name) not in kept]:
        del model.layers[name]
    if stage > 0:
        model.tok_embeddings = None
    if stage < stages - 1:
        model.norm = model.lm_head = None


def _divide(model: PolicyModel, mesh: Mesh, settings: TrainerSettings) -> None:
    """Tensor parallelism: each rank keeps its part of every matrix."""
    if settings.tensor_parallel == 1:
        return
    model.parallelize(mesh.dims)
    if model.enable_weight_tying:  # each of the two names was divided on its own
        model.tok_embeddings.weight = model.lm_head.weight


def _wrap_layers(model: PolicyModel, mesh: Mesh, settings: TrainerSettings) -> None:
    """Activation checkpointing, then compilation of each layer."""
    policies: dict[str, Any] = {"selective": SelectiveAC, "full": FullAC}
    if settings.activation_checkpointing != "none":
        policies[settings.activation_checkpointing].Config().build(dump_folder="").apply(model)
    if settings.compile:
        _compile(model)


def _compile(model: PolicyModel) -> None:
    """Compile each layer. There are two shapes (``packing``), with and without gradients, for trainer and reference:
    each gets code of its own, never code for all shapes."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for layer in model.layers.values():
        layer.compile(fullgraph=True, dynamic=False)


def _shard(model: PolicyModel, dims: ParallelDims, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Shard parameters over the data-parallel ranks. A single one keeps what it has gathered until the backward pass:
    there is nothing to free."""
    apply_fsdp_to_decoder(
        model,
        dims.get_mesh("fsdp"),
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        pp_enabled=dims.pp_enabled,
        reshard_after_forward_policy="never" if dims.dp_shard == 1 else "default",
    )
    if device.type == "cpu":  # gloo cannot scale while it reduces
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def _set_timeouts(dims: ParallelDims, timeout_s: float) -> None:
    """From now on every collective has this long; the group's own limit covered the start. (``Pipeline`` sees to its
    sends and receives.)"""
    groups = [mesh.get_group() for mesh in dims.get_all_one_dimensional_meshes().values()]
    for group in [*groups, dist.group.WORLD]:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def _narrow(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Before they have memory. (Not ``model.to(dtype)``: RoPE tables stay float32.)"""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def _materialize(model: PolicyModel, device: torch.device) -> PolicyModel:
    """Memory for parameters and buffers on ``device``; buffers are filled, tied parameters tied again."""
    model.to_empty(device=device)
    model.init_states(buffer_device=device)
    return model

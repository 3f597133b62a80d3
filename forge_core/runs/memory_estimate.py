"""How much memory each role of a run takes, and whether that fits: ``forge config CONFIG --estimate``.

The figures are sums of what is held at the worst moment of a step; they come from the configuration alone. What they
leave out (fragmentation, buffers of kernels and of communication) is why a GPU counts as full at ``USABLE``.

- The trainer holds float32 parameters, gradients and two moments, sharded; a gathered copy in the compute type; what
  the backward pass needs of a micro-batch; and the logits' working memory.
- A vLLM engine takes its share of the GPU whatever the model: what weights and working memory leave is its KV cache,
  unless ``kv_cache_memory_bytes`` states how large that is.
- ``process`` is a process of its own. The run's own process, with the roles that are threads of it, is counted once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from forge_core.config import RunConfig
from forge_core.config.any_config import AnyConfig
from forge_core.devices import Placement
from forge_core.generation.vllm_settings import CACHE_BYTES
from forge_core.observability.memory import SETTINGS
from forge_core.runs.engines import memory_share
from forge_core.runs.model_shape import ModelShape
from forge_core.training.launch import apart

GIB = 1024**3
PROCESS = 700_000_000  # Python and torch, in the memory of the machine
CONTEXT = 500_000_000  # of one process on a GPU
USABLE = 0.95  # of a GPU
CPU_LOGITS, CPU_KEPT = 1 << 24, 1 << 26  # numbers of a chunk, and kept for the backward pass, on a CPU
CPU_COPIES = 5  # of a chunk: probabilities, gradients, products
GPU_LOGITS, GPU_KEPT_SHARE = 1 << 28, 1 / 16  # on a GPU: numbers of a chunk, and the share of the memory kept
FLOAT32 = 4
PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "KV cache", "process")


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one process of a role at its worst moment. ``asleep``: those it keeps while another role has the GPU.
    ``gpus``: one id for each process of the role that is on a GPU; else there are ``processes`` on the CPU. ``apart``:
    whether these are other processes than the run's own."""

    role: str
    gpus: tuple[str, ...]
    processes: int
    parts: Mapping[str, int]
    asleep: int
    settings: tuple[str, ...] = field(default=())
    apart: bool = False

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class DeviceFit:
    """``device``: a GPU's id, or ``memory`` for the machine's own; bytes needed and there; settings that change it."""

    device: str
    needed: int
    present: int
    settings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.needed <= self.present * (USABLE if self.device != "memory" else 1)


def roles_memory(
    config: RunConfig, shape: ModelShape, placement: Placement, gpu_memory: Mapping[str, int]
) -> list[RoleMemory]:
    """The roles of a run under ``placement``; ``gpu_memory``: bytes of each GPU."""
    roles = [_generator(config, shape, placement, gpu_memory), trainer_memory(config, shape, placement, gpu_memory)]
    if config.services.ref_model is not None and config.grpo.beta > 0:
        roles.append(_reference(config, shape, placement))
    return roles


def fits(
    config: RunConfig, roles: list[RoleMemory], gpu_memory: Mapping[str, int], machine_memory: int
) -> list[DeviceFit]:
    """Each GPU that has a role, then the machine's own memory."""
    gpus = sorted({gpu for role in roles for gpu in role.gpus}, key=list(gpu_memory).index)
    turns = config.generator.backend == "vllm" and config.generator.sharing == "sleep"
    found = []
    for gpu in gpus:
        here = [role for role in roles if gpu in role.gpus]
        found.append(DeviceFit(gpu, _together(here, turns), gpu_memory[gpu], _settings(here)))
    on_cpu = [role for role in roles if not role.gpus]
    needed = PROCESS + sum(role.total * role.processes for role in on_cpu)
    needed += sum(_in_host_memory(role) for role in roles if role.gpus)
    return [*found, DeviceFit("memory", needed, machine_memory, _settings(on_cpu or roles))]


def trainer_parts(config: AnyConfig, shape: ModelShape, gpu_memory: int | None) -> dict[str, int]:
    """Bytes of one trainer rank. ``gpu_memory``: of its GPU; None: it works on the CPU."""
    p, width = config.parallelism, _width(config.training.dtype)
    shards, tensor = p.data_parallel_shard_degree, p.tensor_parallel_degree
    layers = math.ceil(shape.layers / p.pipeline_parallel_degree)
    matrices = shape.matrix * (1 if shape.tied or p.pipeline_parallel_degree > 1 else 2)
    own = math.ceil((layers * shape.layer_parameters + matrices) / tensor)
    tokens = _tokens(config)
    gathered = 0
    if shards > 1:  # two layers at a time, the output matrix, and a gradient before it is reduced
        largest = max(shape.layer_parameters, shape.matrix)
        gathered = (width * (2 * shape.layer_parameters + shape.matrix) + (width + FLOAT32) * largest) // tensor
    elif width != FLOAT32 and tensor * p.pipeline_parallel_degree == 1:  # rounded copies, and their gradients
        gathered = 2 * width * own
    elif width != FLOAT32:  # all of them stay
        gathered = width * own + (width + FLOAT32) * max(shape.layer_parameters, shape.matrix) // tensor
    return {
        "parameters": FLOAT32 * own // shards,
        "gradients": FLOAT32 * own // shards,
        "optimizer": 2 * FLOAT32 * own // shards,
        "gathered": gathered,
        "activations": tokens * activation_bytes(config, shape, gpu_memory is None) + _mask(config, tokens, gpu_memory),
        "logits": _logits(shape, tokens, tensor, width, gpu_memory),
    }


def trainer_memory(
    config: AnyConfig, shape: ModelShape, placement: Placement, gpu_memory: Mapping[str, int]
) -> RoleMemory:
    """One rank of the trainer."""
    gpus, ranks = placement.trainer, config.parallelism.ranks
    parts = trainer_parts(config, shape, gpu_memory[gpus[0]] if gpus else None)
    kept = sum(parts[name] for name in ("parameters", "optimizer"))
    overhead = CONTEXT if gpus else PROCESS if apart(config) else 0
    role = "trainer" if ranks == 1 else f"trainer, each of {ranks} ranks"
    found = {**parts, "process": overhead}
    return RoleMemory(role, gpus, ranks, found, kept + overhead, SETTINGS["trainer"], apart(config))


def _generator(config: RunConfig, shape: ModelShape, placement: Placement, gpu_memory: Mapping[str, int]) -> RoleMemory:
    gpus = tuple(gpu for replica in placement.generator for gpu in replica)
    if config.generator.backend == "hf":
        parts = _embedded_generator(config, shape)
        return RoleMemory("generator", gpus, 1, parts, sum(parts.values()), SETTINGS["hf generator"])
    if not gpus:
        parts = _vllm_on_cpu(config, shape)
        processes = len(placement.generator)
        return RoleMemory("generator, each engine", (), processes, parts, sum(parts.values()), _VLLM_ON_CPU)
    parts = _vllm_on_gpu(config, shape, placement, gpu_memory[gpus[0]])
    return RoleMemory("generator, each GPU", gpus, len(gpus), parts, parts["process"], SETTINGS["vllm generator"])


_VLLM_ON_CPU = (
    "services.generator.num_replicas (lower)",
    "generator.engine_args.kv_cache_memory_bytes, or where it is not set VLLM_CPU_KVCACHE_SPACE (lower; GiB, an "
    "environment variable)",
)


def _embedded_generator(config: RunConfig, shape: ModelShape) -> dict[str, int]:
    width = _width(config.generator.dtype)
    sequences = min(config.generator.max_batch, config.episodes_at_first)
    return {
        "parameters": width * shape.parameters,
        "logits": sequences * shape.vocabulary * (width + 2 * FLOAT32),
        "KV cache": sequences * config.training.seq_len * _kv_bytes(shape, width),
    }


def _vllm_on_cpu(config: RunConfig, shape: ModelShape) -> dict[str, int]:
    untied = shape.matrix if shape.tied else 0  # on a CPU the output matrix is written out
    return {
        "parameters": _width(config.generator.dtype) * (shape.parameters + untied),
        "KV cache": _stated(config) or round(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB),
        "process": 2 * PROCESS,  # the engine and its worker
    }


def _vllm_on_gpu(config: RunConfig, shape: ModelShape, placement: Placement, memory: int) -> dict[str, int]:
    share = float(config.generator.engine_args.get("gpu_memory_utilization", memory_share(config, placement)))
    width, procs = _width(config.generator.dtype), config.services.generator.procs
    parameters = width * shape.parameters // procs
    working = min(config.training.seq_len * 4, 8192) * (4 * shape.feed_forward + shape.vocabulary) * width // procs
    cache = round(share * memory) - parameters - working - CONTEXT
    smallest = config.training.seq_len * _kv_bytes(shape, width) // procs  # one sequence must fit
    parts = {
        "parameters": parameters,
        "activations": working,
        "KV cache": _stated(config) or max(cache, smallest),
        "process": CONTEXT,
    }
    return {name: config.generator.engines_per_gpu * size for name, size in parts.items()}


def _stated(config: RunConfig) -> int:
    """Bytes of an engine's key/value cache where ``generator.engine_args`` states them; vLLM takes it at its word."""
    return int(config.generator.engine_args.get(CACHE_BYTES) or 0)


def _reference(config: RunConfig, shape: ModelShape, placement: Placement) -> RoleMemory:
    width, tokens = _width(config.training.dtype), config.token_budget
    parts = {
        "parameters": width * shape.parameters,
        "activations": width * tokens * (shape.hidden * 3 + shape.queries + 2 * shape.keys + 2 * shape.feed_forward),
        "logits": 2 * FLOAT32 * min(tokens * shape.vocabulary, GPU_LOGITS if placement.reference else CPU_LOGITS),
    }
    return RoleMemory("reference", placement.reference, 1, parts, sum(parts.values()), SETTINGS["reference model"])


def activation_bytes(config: AnyConfig, shape: ModelShape, on_cpu: bool) -> int:
    """Bytes that one token keeps for the backward pass, and needs in it.

    Pipeline parallelism does not lower it: a stage has fewer layers and as many more micro-batches at a time. Under
    tensor parallelism the residual stream is divided too (sequence parallelism), the inputs of matrices are not.
    """
    tensor = config.parallelism.tensor_parallel_degree
    stream = shape.hidden // tensor
    whole = 2 * shape.hidden + (4 if on_cpu else 2) * stream + _divided(shape, on_cpu) // tensor
    kept = {
        "none": whole,
        "selective": 2 * stream + (2 * shape.queries + shape.keys + shape.feed_forward) // tensor,
        "full": stream,
    }[config.training.activation_checkpointing]
    again = whole if kept != whole else (2 * shape.feed_forward + stream) // tensor  # of the layer in the backward pass
    return _width(config.training.dtype) * (shape.layers * kept + again)


def _divided(shape: ModelShape, on_cpu: bool) -> int:
    """Queries, keys and values, before and after normalisation and rotation, attention's output; four times the
    feed-forward width. A CPU has no fused normalisation, which would spare the normalised values."""
    normalised = (shape.queries + shape.keys) * (2 if on_cpu else 1) if shape.qk_norm else 0
    return normalised + 2 * shape.queries + 2 * shape.keys + 4 * shape.feed_forward


def _mask(config: AnyConfig, tokens: int, gpu_memory: int | None) -> int:
    """On a CPU packed documents take a dense mask; a row is about as long as a document."""
    return tokens * config.training.seq_len * (_width(config.training.dtype) + 3) if gpu_memory is None else 0


def _logits(shape: ModelShape, tokens: int, tensor: int, width: int, gpu_memory: int | None) -> int:
    vocabulary = math.ceil(shape.vocabulary / tensor)
    gradient = FLOAT32 * vocabulary * shape.hidden
    numbers = tokens * vocabulary
    if gpu_memory is None:
        kept = FLOAT32 * numbers if numbers <= CPU_KEPT else 0
        return kept + CPU_COPIES * FLOAT32 * min(numbers, CPU_LOGITS) + gradient
    if width * numbers <= GPU_KEPT_SHARE * gpu_memory:
        return width * numbers + width * vocabulary * shape.hidden
    return width * min(numbers, GPU_LOGITS) + gradient


def _tokens(config: AnyConfig) -> int:
    """Positions of a micro-batch: the budget, or what one rank's share of an optimizer step has at most."""
    episodes = math.ceil(config.sequences_per_optimizer_step / config.parallelism.data_parallel_shard_degree)
    return min(config.token_budget, episodes * config.training.seq_len)


def _kv_bytes(shape: ModelShape, width: int) -> int:
    """Of one token, in all layers."""
    return 2 * shape.layers * shape.keys * width


def _width(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2}[dtype]


def _together(here: list[RoleMemory], turns: bool) -> int:
    """Bytes of the roles on one GPU: all at their worst, or one after the other while the others sleep."""
    if not turns or len(here) < 2:
        return sum(role.total for role in here)
    asleep = sum(role.asleep for role in here)
    return max(asleep - role.asleep + role.total for role in here)


def _in_host_memory(role: RoleMemory) -> int:
    """What a role on GPUs takes of the machine's memory: child processes, and the weights of engines that sleep."""
    if role.settings == SETTINGS["vllm generator"]:
        return role.processes * (PROCESS + role.parts["parameters"])
    return role.processes * PROCESS if role.apart else 0


def _settings(roles: list[RoleMemory]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(setting for role in roles for setting in role.settings))

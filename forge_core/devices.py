"""Which GPU each role of a run works on.

Guarantees:
- ``place`` is a pure function of the configuration and the ids of the GPUs: every role is placed, or the run is refused
  with the numbers and with settings that do fit.
- No GPU has two roles, with two exceptions: the reference may sit beside the trainer, and on a machine with one GPU
  generator and trainer share it (``Placement.shared``).
- Ids are those of ``CUDA_VISIBLE_DEVICES`` (ROCm: ``HIP_VISIBLE_DEVICES``), so a process that runs where some GPUs are
  hidden gives its children only what it was given itself.

``with_gpus`` of a role: true: GPUs of its own (where a GPU must be shared, that is a warning); null: on GPUs where the
machine has any; false: on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.config.errors import ConfigError
from forge_core.config.run_config import RunConfig
from forge_core.nvidia_smi import whole_uuids
from forge_core.training.launch import ranks_per_node

if TYPE_CHECKING:
    import torch

    from forge_core.config.any_config import AnyConfig

CPU = "cpu"
DRIVERS = ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg")  # device files of NVIDIA's, AMD's and WSL's drivers
SERVICES = {"generator": "generator", "trainer": "trainer", "reference": "ref_model"}  # role -> its key of services
NONE = "-1"  # hides every GPU from CUDA and from HIP, which takes an empty value for none given
GENERATOR, TRAINER, REFERENCE = "services.generator", "services.trainer", "services.ref_model"


@dataclass(frozen=True)
class Placement:
    """GPU ids of each generator replica, of each trainer rank of this node, and of the reference; empty: on the CPU.
    ``shared``: generator and trainer have the same GPU."""

    generator: tuple[tuple[str, ...], ...]
    trainer: tuple[str, ...]
    reference: tuple[str, ...]
    shared: bool = False

    @staticmethod
    def environment(ids: Sequence[str]) -> dict[str, str]:
        """The variables that show a child process the GPUs ``ids`` and no others."""
        visible = ",".join(ids) or NONE
        return dict.fromkeys(_variables(), visible)

    def device(self, role: str) -> str:
        """Torch's name, in this process, of the first device of ``role`` (a key of ``services``)."""
        ids = {"generator": self.generator[0], "trainer": self.trainer, "ref_model": self.reference}[role]
        return torch_device(ids[0]) if ids else CPU


def visible_gpus() -> tuple[str, ...]:
    """Ids of the GPUs that this process sees, as its ``*_VISIBLE_DEVICES`` name them, but with whole UUIDs; indices
    where none is set."""
    if sys.platform == "linux" and not any(path for name in DRIVERS for path in Path("/dev").glob(name)):
        return ()  # no driver: known without torch, whose import takes seconds
    import torch

    listed = next((os.environ[name] for name in reversed(_variables()) if name in os.environ), None)
    return whole_uuids(gpu_ids(listed, torch.cuda.device_count()))


def gpu_ids(listed: str | None, count: int) -> tuple[str, ...]:
    """The ids in ``listed`` (the variable's value; None: not set) of the ``count`` GPUs that the driver shows.

    The driver stops at the first id that it does not know, so the first ``count`` are the visible ones.
    """
    if listed is None:
        return tuple(str(index) for index in range(count))
    return tuple(word.strip() for word in listed.split(","))[:count]


def gpu_memory() -> dict[str, int]:
    """Bytes of memory of each visible GPU, by id."""
    import torch

    sizes = (torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))
    return dict(zip(visible_gpus(), sizes, strict=True))


def torch_device(gpu: str) -> str:
    """Torch's name of a visible GPU in this process, such as ``cuda:1`` (on ROCm too); ``cpu`` for no id."""
    return f"cuda:{visible_gpus().index(gpu)}" if gpu else CPU


def work_on(device: torch.device) -> None:
    """Make ``device`` that of the calling thread, before it works there. Streams, events, random state and memory
    figures that name no device are those of a thread's own, and in a new thread that is the first GPU, whatever GPU its
    tensors are on: a wait for it would not wait for them. (``cuda`` without a number means the thread's own.)"""
    if device.type == "cuda" and device.index is not None:
        import torch

        torch.cuda.set_device(device)


def free_cached_memory() -> None:
    """Give the GPUs back what torch keeps of freed memory: vLLM takes its share of what others leave."""
    import torch

    torch.cuda.empty_cache()  # nothing where this process has used no GPU


def place(config: RunConfig, gpus: Sequence[str], *, nodes: int = 1) -> Placement:
    """Where the roles of ``config`` work on a machine with ``gpus``, one of ``nodes`` that share the trainer's ranks.

    Raises ConfigError, with the number each role wants and settings that fit, when there are not enough.
    """
    roles = _on_gpus(config, gpus, nodes)
    own = _assign(roles, gpus)
    if own is None:
        raise ConfigError(_refusal(config, roles, gpus, nodes))
    replicas, procs = generator_shape(config)
    ids, trainer = own.get(GENERATOR, ()), own.get(TRAINER, ())
    generator = tuple(ids[i * procs : (i + 1) * procs] for i in range(replicas))  # of empty ones on the CPU
    return Placement(generator, trainer, own.get(REFERENCE, ()), shared=bool(ids) and ids == trainer)


def place_trainer(config: AnyConfig, gpus: Sequence[str], *, nodes: int = 1) -> Placement:
    """Where the trainer of ``config`` works on a machine with ``gpus`` when it is the only role. Raises ConfigError."""
    ranks, wanted = ranks_per_node(config, nodes), config.services.trainer.with_gpus
    if wanted is False or not (gpus or wanted):
        return Placement(((),), (), ())
    if ranks > len(gpus):
        smaller = f"parallelism.data_parallel_shard_degree={len(gpus)}" if gpus else f"{TRAINER}.with_gpus=false"
        raise ConfigError(
            f"parallelism: not enough GPUs: {ranks} are wanted (data_parallel_shard_degree x tensor_parallel_degree x "
            f"pipeline_parallel_degree), but {_where(nodes)} has {len(gpus)}: lower a degree, such as {smaller}"
        )
    return Placement(((),), tuple(gpus[:ranks]), ())


def alone(config: RunConfig, role: str) -> RunConfig:
    """``config`` for a machine where only ``role`` works: the others want none of its GPUs."""
    services, own = config.services, SERVICES.get(role)
    elsewhere = {
        name: section.model_copy(update={"with_gpus": False})
        for name, section in ((name, getattr(services, name)) for name in type(services).model_fields if name != own)
        if section is not None
    }
    return config.model_copy(update={"services": services.model_copy(update=elsewhere)})


def sampling_nothing(config: RunConfig) -> RunConfig:
    """``config`` for a process that generates nothing: the generator wants no GPU."""
    generator = config.services.generator.model_copy(update={"with_gpus": False})
    return config.model_copy(update={"services": config.services.model_copy(update={"generator": generator})})


def generator_shape(config: RunConfig) -> tuple[int, int]:
    """Replicas of the generator and GPUs of each; the embedded backend is one replica with one."""
    service = config.services.generator
    return (1, 1) if config.generator.backend == "hf" else (service.num_replicas, service.procs)


def engine_count(config: RunConfig) -> int:
    """Sampling engines of the generator."""
    return generator_shape(config)[0] * (config.generator.engines_per_gpu if config.generator.backend == "vllm" else 1)


def gpus_wanted(config: RunConfig, *, nodes: int = 1) -> dict[str, int]:
    """GPUs that each role would have where there are enough; roles that stay on the CPU are left out."""
    return {role.key: role.count for role in _roles(config, nodes) if role.with_gpus is not False}


def insisting(config: RunConfig) -> list[str]:
    """The roles that say ``with_gpus: true``."""
    return [role.key for role in _roles(config, 1) if role.with_gpus]


@dataclass(frozen=True)
class _Role:
    key: str
    count: int  # GPUs wanted
    with_gpus: bool | None


Own = dict[str, tuple[str, ...]]


def _variables() -> tuple[str, ...]:
    import torch

    return ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if torch.version.hip else ("CUDA_VISIBLE_DEVICES",)


def _roles(config: RunConfig, nodes: int) -> list[_Role]:
    services, (replicas, procs) = config.services, generator_shape(config)
    roles = [
        _Role(GENERATOR, replicas * procs, services.generator.with_gpus),
        _Role(TRAINER, ranks_per_node(config, nodes), services.trainer.with_gpus),
    ]
    if services.ref_model is not None and config.grpo.beta > 0:
        roles.append(_Role(REFERENCE, 1, services.ref_model.with_gpus))
    return roles


def _on_gpus(config: RunConfig, gpus: Sequence[str], nodes: int) -> list[_Role]:
    """The roles that want GPUs: on a machine without any, those that insist."""
    wishes = (True, None) if gpus else (True,)
    return [role for role in _roles(config, nodes) if role.with_gpus in wishes]


def _assign(roles: Sequence[_Role], gpus: Sequence[str]) -> Own | None:
    """The GPUs of each role; None when they do not suffice."""
    ways = (_own, _reference_beside_trainer, _on_one)
    return next((own for way in ways if (own := way(roles, gpus)) is not None), None)


def _own(roles: Iterable[_Role], gpus: Sequence[str]) -> Own | None:
    """Every role's own GPUs, in order; None when there are too few."""
    found, start = {}, 0
    for role in roles:
        found[role.key] = tuple(gpus[start : start + role.count])
        start += role.count
    return found if start <= len(gpus) else None


def _reference_beside_trainer(roles: Sequence[_Role], gpus: Sequence[str]) -> Own | None:
    """The others have GPUs of their own; the reference is on the trainer's first, or on the CPU when that has none."""
    reference = next((role for role in roles if role.key == REFERENCE), None)
    own = _own([role for role in roles if role.key != REFERENCE], gpus)
    if reference is None or own is None:
        return None
    if TRAINER in own:
        return {**own, REFERENCE: own[TRAINER][:1]}
    return None if reference.with_gpus else own


def _on_one(roles: Sequence[_Role], gpus: Sequence[str]) -> Own | None:
    """Generator, trainer and reference share a machine's only GPU."""
    if len(gpus) != 1 or not {GENERATOR, TRAINER} <= {role.key for role in roles}:
        return None
    return {role.key: tuple(gpus) for role in roles} if all(role.count == 1 for role in roles) else None


def _refusal(config: RunConfig, roles: Sequence[_Role], gpus: Sequence[str], nodes: int) -> str:
    wanted = ", ".join(f"{role.key} {role.count}" for role in roles)
    total = sum(role.count for role in roles)
    remedy = next(change for change in _remedies(config, roles, len(gpus)) if _fits(config, change, gpus, nodes))
    return (
        f"services: not enough GPUs: {total} are wanted ({wanted}), but {_where(nodes)} has {len(gpus)}: "
        f"use {' '.join(f'{key}={value}' for key, value in remedy.items())}"
    )


def _where(nodes: int) -> str:
    return "this machine" if nodes == 1 else "a node"


Change = dict[str, int | str]


def _remedies(config: RunConfig, roles: Sequence[_Role], present: int) -> Iterable[Change]:
    """Changes to try, those that change least first; the last one always fits."""
    if present:
        if any(role.key == REFERENCE for role in roles):
            yield {f"{REFERENCE}.with_gpus": "null"}
        yield from _smaller(config, roles, present)
    yield {f"{role.key}.with_gpus": "false" for role in roles}


def _smaller(config: RunConfig, roles: Sequence[_Role], present: int) -> Iterable[Change]:
    """Fewer generator replicas, else fewer data-parallel ranks, else one replica and fewer ranks, else one of each."""
    (replicas, procs), counts = generator_shape(config), {role.key: role.count for role in roles}
    trainer, degree = counts.get(TRAINER, 0), config.parallelism.data_parallel_shard_degree
    fewer_replicas: Change = {f"{GENERATOR}.num_replicas": (present - trainer) // procs}
    if 0 < (present - trainer) // procs < replicas:
        yield fewer_replicas
    one = {f"{GENERATOR}.num_replicas": 1} if replicas > 1 else {}
    for change, rest in (({}, present - counts.get(GENERATOR, 0)), (one, present - procs)):
        fewer = max(rest, 0) * degree // trainer if trainer else 0
        if 0 < fewer < degree:
            yield {**change, "parallelism.data_parallel_shard_degree": fewer}
    degrees: Change = {f"parallelism.{key}": 1 for key, value in config.parallelism.model_dump().items() if value > 1}
    yield {**one, **degrees}
    yield {**one, **({f"{GENERATOR}.procs": 1} if procs > 1 else {}), **degrees}


def _fits(config: RunConfig, change: Change, gpus: Sequence[str], nodes: int) -> bool:
    from forge_core.config.loader import load_config

    changed = load_config(config, [f"{key}={value}" for key, value in change.items()])
    try:
        return _assign(_on_gpus(changed, gpus, nodes), gpus) is not None
    except ConfigError:  # ranks that cannot be divided among the nodes
        return False

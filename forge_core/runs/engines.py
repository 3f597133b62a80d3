"""Which sampling engine a run uses, and with which settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forge_core.generation.vllm_settings import states_memory
from forge_core.logs import engine_logs

if TYPE_CHECKING:
    from forge_core.config import RunConfig
    from forge_core.devices import Placement
    from forge_core.generation.base import Generator
    from forge_core.stop import StopToken

SHARED_MEMORY = 0.4  # of a GPU that the trainer uses too, where generator.engine_args does not say
OWN_MEMORY = 0.9


class Host(Protocol):
    """Who loads an engine: a run (``RunContext``), or an evaluation. ``weights_dir`` gives the folder of a version,
    ``role`` is that of this process (None: all of them), ``stop`` ends engines that are being loaded."""

    run_id: str
    role: str | None
    stop: StopToken

    @property
    def config(self) -> RunConfig: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def cpu_threads(self) -> int: ...
    def weights_dir(self, version: int) -> Path: ...
    def device(self, role: str) -> str: ...


def build_generator(ctx: Host, version: int) -> Generator:
    """The engine of ``generator.backend``, loaded with ``version``."""
    return _vllm(ctx, version) if ctx.config.generator.backend == "vllm" else _embedded(ctx, version)


def takes_turns(ctx: Host) -> bool:
    """Whether generator and trainer use one GPU one after the other (vLLM sleeps while the trainer works)."""
    config = ctx.config.generator
    return config.backend == "vllm" and config.sharing == "sleep" and ctx.placement.shared


def may_load_beside(config: RunConfig) -> bool:
    """Whether others may take memory of a GPU while an engine of ``config`` loads on it."""
    return config.generator.backend == "vllm" and states_memory(config.generator.engine_args)


def memory_share(config: RunConfig, placement: Placement) -> float:
    """Of a GPU, what one vLLM engine takes where ``generator.engine_args`` does not say."""
    return (SHARED_MEMORY if placement.shared else OWN_MEMORY) / config.generator.engines_per_gpu


def logs_folder(ctx: Host) -> Path:
    """Where the child processes of this process write their logs."""
    return engine_logs(ctx.run_id, ctx.role)


def _embedded(ctx: Host, version: int) -> Generator:
    from forge_core.generation.hf import HFGenerator

    g = ctx.config.generator
    return HFGenerator(
        ctx.weights_dir,
        version=version,
        dtype=g.dtype,
        device=ctx.device("generator"),
        max_batch=g.max_batch,
        threads=g.threads or ctx.cpu_threads,
    )


def _vllm(ctx: Host, version: int) -> Generator:
    from forge_core.generation.vllm import VLLMGenerator
    from forge_core.generation.vllm_settings import VLLMSettings

    g, placement = ctx.config.generator, ctx.placement
    settings = VLLMSettings(
        gpus=tuple(gpus for gpus in placement.generator for _ in range(g.engines_per_gpu if gpus else 1)),
        dtype=g.dtype,
        max_model_len=ctx.config.training.seq_len,
        engine_args=g.engine_args,
        sampling_params=g.sampling_params,
        drain=g.weight_update == "drain",
        sleep=takes_turns(ctx),
        memory_share=memory_share(ctx.config, placement),
        threads=g.threads or ctx.cpu_threads,
    )
    return VLLMGenerator(ctx.weights_dir, version=version, settings=settings, logs=logs_folder(ctx), stop=ctx.stop)

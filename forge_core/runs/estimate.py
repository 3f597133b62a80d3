"""What a run will take, said in one line before it starts.

The figures are rough on purpose: parameters from the model's configuration, floating-point operations per token from
the usual 2N (forward) and 6N (forward and backward). The speed of a GPU is looked up by its name, since measuring would
take memory on it that the engines are to have; that of a CPU comes from matrix products of 50 ms. Memory is that of
``memory_estimate.py``.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from forge_core.config import RunConfig
from forge_core.devices import CPU, gpu_memory, place, visible_gpus
from forge_core.runs.gpu_speed import PEAK_FLOPS, peak_flops
from forge_core.runs.memory_estimate import PROCESS, roles_memory
from forge_core.runs.model_shape import ModelShape, model_shape

EPISODE_BYTES_PER_TOKEN = 9  # token id, mask and log-probability in Parquet, about
FILLED = 0.75  # share of training.seq_len that an episode takes, about
TASK_SECONDS = 0.15  # orchestration and storage of a training step, about
START_SECONDS = 15.0  # Prefect server, imports, loading the engines
EFFICIENCY = 0.6  # share of the matrix product's speed that a transformer reaches
OF_PEAK = 0.5  # share of a GPU's peak that its matrix products have: times EFFICIENCY, a usual trainer's 30 % of it
FLOAT32_OF_PEAK = OF_PEAK / 16  # the same in float32, which tensor cores leave to others


@dataclass(frozen=True)
class Estimate:
    """``memory`` and ``stored`` in bytes, ``seconds`` of wall time (generation and training one after the other)."""

    parameters: int
    memory: int
    stored: int
    seconds: float


def estimate_line(config: RunConfig) -> str:
    """One line: parameters, memory, bytes stored, time."""
    e = estimate(config, flops_per_second(config))
    return (
        f"expected: {e.parameters / 1e6:.1f} M parameters, {_bytes(e.memory)} of memory, {_bytes(e.stored)} stored, "
        f"about {_minutes(e.seconds)} for {_counted(config.steps, 'step')}"
    )


def estimate(config: RunConfig, flops: float) -> Estimate:
    """``flops``: floating-point operations a second of this machine."""
    shape = model_shape(config)
    seconds = _seconds(config, shape.parameters, flops)
    return Estimate(shape.parameters, _memory(config, shape), _stored(config, shape.parameters, seconds), seconds)


def _seconds(config: RunConfig, n: int, flops: float) -> float:
    response, filled = config.rollout.max_new_tokens, FILLED * config.training.seq_len
    train = (6 + 2 * (config.grpo.beta > 0)) * n * filled * config.episodes_per_batch * config.training.epochs_per_batch
    sample = 4 * n * response
    evaluations = 2 + (config.steps // config.eval.interval if config.eval.interval else 0)
    work = config.steps * (train + sample * config.episodes_at_first) + evaluations * sample * config.eval.prompts
    warm = config.warm_start
    work += 6 * n * warm.steps * warm.batch_size * filled if warm else 0
    return START_SECONDS + config.steps * TASK_SECONDS + work / (flops * EFFICIENCY)


def _memory(config: RunConfig, shape: ModelShape) -> int:
    """Of all processes of all roles, on GPUs or not."""
    gpus = gpu_memory()
    roles = roles_memory(config, shape, place(config, tuple(gpus)), gpus)
    return PROCESS + sum(role.total * role.processes for role in roles)


@dataclass(frozen=True)
class StepEstimate:
    """One training step: ``tokens`` trained on, about; bytes of its ``episodes``, of the ``weights`` that it publishes,
    and of a ``checkpoint`` (not every step writes one)."""

    tokens: int
    episodes: int
    weights: int
    checkpoint: int


def step_estimate(config: RunConfig, parameters: int) -> StepEstimate:
    tokens = round(config.episodes_per_batch * FILLED * config.training.seq_len)
    width = 4 if config.weights_dtype == "float32" else 2
    return StepEstimate(tokens, tokens * EPISODE_BYTES_PER_TOKEN, width * parameters, 12 * parameters)


def _stored(config: RunConfig, n: int, seconds: float) -> int:
    """Episodes of the whole run; weights and checkpoints that are kept, or not yet deleted (``gc.grace``)."""
    waiting = config.gc.grace / (seconds / config.steps)  # training steps whose garbage is still there
    versions = min(config.steps, config.weights.keep + config.max_staleness + waiting) + 1
    every = config.checkpoint.interval or config.steps
    checkpoints = min(math.ceil(config.steps / every), config.checkpoint.keep + waiting / every)
    step = step_estimate(config, n)
    return round(versions * step.weights + checkpoints * step.checkpoint + config.steps * step.episodes)


def flops_per_second(config: RunConfig) -> float:
    """Speed of matrix products of ``training.dtype`` where the trainer will run. A GPU that is not in the table counts
    as the slowest of it. Raises ConfigError, as ``place``, when the machine has too few GPUs."""
    device = place(config, visible_gpus()).device("trainer")
    if device == CPU:
        return _measured()
    share = FLOAT32_OF_PEAK if config.training.dtype == "float32" else OF_PEAK
    return share * (peak_flops(device) or min(PEAK_FLOPS.values()))


def _measured() -> float:
    """Of float32 on this CPU: the best of a few. The first, which may load libraries for a second, does not count."""
    import torch

    n = 1024
    a = torch.ones(n, n)
    float((a @ a)[0, 0])
    best, ends = 0.0, time.perf_counter() + 0.05
    while best == 0.0 or time.perf_counter() < ends:
        started = time.perf_counter()
        float((a @ a)[0, 0])
        best = max(best, 2 * n**3 / (time.perf_counter() - started))
    return best


def _bytes(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"


def _minutes(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds > 5400 else _counted(max(1, round(seconds / 60)), "minute")


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"

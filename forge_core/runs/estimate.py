"""What a run will take, said in one line before it starts.

The figures are rough on purpose: parameters from the model's configuration, floating-point operations per token from
the usual 2N (forward) and 6N (forward and backward), and this machine's speed from a matrix product of 50 ms.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_core.config import RunConfig
from forge_core.config.run_config import ScratchModel

EPISODE_BYTES_PER_TOKEN = 9  # token id, mask and log-probability in Parquet, about
FILLED = 0.75  # share of training.seq_len that an episode takes, about
TASK_SECONDS = 0.15  # orchestration and storage of a training step, about
START_SECONDS = 15.0  # Prefect server, imports, loading the engines
PROCESS_BYTES = 700_000_000  # Python, torch and Prefect
EFFICIENCY = 0.6  # share of the matrix product's speed that a transformer reaches


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
        f"about {_minutes(e.seconds)} for {config.steps} steps"
    )


def estimate(config: RunConfig, flops: float) -> Estimate:
    """``flops``: floating-point operations a second of this machine."""
    n, vocabulary = model_size(config)
    seconds = _seconds(config, n, flops)
    return Estimate(n, _memory(config, n, vocabulary), _stored(config, n, seconds), seconds)


def _seconds(config: RunConfig, n: int, flops: float) -> float:
    response, filled = config.rollout.max_new_tokens, FILLED * config.training.seq_len
    train = (6 + 2 * (config.grpo.beta > 0)) * n * filled * config.episodes_per_batch * config.training.epochs_per_batch
    sample = 4 * n * response
    evaluations = 2 + (config.steps // config.eval.interval if config.eval.interval else 0)
    work = config.steps * (train + sample * config.episodes_per_batch) + evaluations * sample * config.eval.prompts
    warm = config.warm_start
    work += 6 * n * warm.steps * warm.batch_size * filled if warm else 0
    return START_SECONDS + config.steps * TASK_SECONDS + work / (flops * EFFICIENCY)


def _memory(config: RunConfig, n: int, vocabulary: int) -> int:
    """fp32 weights, gradients and two moments; generator; reference; logits and activations of one micro-batch."""
    engines = 16 * n + 4 * n + (4 * n if config.grpo.beta > 0 else 0)
    return engines + config.token_budget * (64 * 1024 + 6 * vocabulary) + PROCESS_BYTES


def _stored(config: RunConfig, n: int, seconds: float) -> int:
    """Episodes of the whole run; weights and checkpoints that are kept, or not yet deleted (``gc.grace``)."""
    waiting = config.gc.grace / (seconds / config.steps)  # training steps whose garbage is still there
    versions = min(config.steps, config.weights.keep + config.max_staleness + waiting) + 1
    every = config.checkpoint.interval or config.steps
    checkpoints = min(math.ceil(config.steps / every), config.checkpoint.keep + waiting / every)
    episodes = config.steps * config.episodes_per_batch * FILLED * config.training.seq_len * EPISODE_BYTES_PER_TOKEN
    return round(versions * n * (4 if config.weights_dtype == "float32" else 2) + checkpoints * 12 * n + episodes)


def model_size(config: RunConfig) -> tuple[int, int]:
    """Parameters and vocabulary of the configured model, from its configuration alone."""
    model = config.model
    if isinstance(model, ScratchModel):
        vocabulary = len(model.vocabulary) + 2
        return _transformer_parameters(model.model_dump(), vocabulary), vocabulary
    from forge_core.models.resolve import resolve_model

    assert model is not None
    hf = json.loads((Path(resolve_model(model)) / "config.json").read_text())
    heads = hf["num_attention_heads"]
    shape = {
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads", heads),
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        "tie_word_embeddings": hf.get("tie_word_embeddings", False),
    }
    return _transformer_parameters(shape, hf["vocab_size"]), hf["vocab_size"]


def _transformer_parameters(m: dict[str, Any], vocabulary: int) -> int:
    attention = m["hidden_size"] * m["head_dim"] * 2 * (m["num_heads"] + m["num_kv_heads"])
    layer = attention + 3 * m["hidden_size"] * m["intermediate_size"]
    return m["num_layers"] * layer + vocabulary * m["hidden_size"] * (1 if m["tie_word_embeddings"] else 2)


def flops_per_second(config: RunConfig) -> float:
    """Speed of a 1024 x 1024 float32 matrix product where the trainer will run: the best of a few."""
    import torch

    on_gpu = config.services.trainer.with_gpus is not False and torch.cuda.is_available()
    a = torch.ones(1024, 1024, device="cuda" if on_gpu else "cpu")
    best, ends = 0.0, time.perf_counter() + 0.05
    while time.perf_counter() < ends:
        started = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the result
        best = max(best, 2 * 1024**3 / (time.perf_counter() - started))
    return best


def _bytes(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"


def _minutes(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{max(1, round(seconds / 60))} minutes"

"""What a run will take, said in one line before it starts.

The figures are rough on purpose: parameters from the model's configuration, floating-point operations per token from
the usual 2N (forward) and 6N (forward and backward), and this machine's speed from a matrix product of 50 ms.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from forge_core.config import RunConfig
from forge_core.config.run_config import ScratchModel

EPISODE_BYTES_PER_TOKEN = 9  # token id, mask and log-probability in Parquet, about
TASK_SECONDS = 0.15  # orchestration and storage of a training step, about
EFFICIENCY = 0.25  # share of the matrix product's speed that a transformer reaches


@dataclass(frozen=True)
class Estimate:
    """``memory`` and ``stored`` in bytes, ``seconds`` of wall time (generation and training one after the other)."""

    parameters: int
    memory: int
    stored: int
    seconds: float


def estimate_line(config: RunConfig) -> str:
    """One line: parameters, memory, bytes stored, time."""
    e = estimate(config, flops_per_second())
    return (
        f"expected: {e.parameters / 1e6:.1f} M parameters, {_bytes(e.memory)} of memory, {_bytes(e.stored)} stored, "
        f"about {_minutes(e.seconds)} for {config.steps} steps"
    )


def estimate(config: RunConfig, flops: float) -> Estimate:
    """``flops``: floating-point operations a second of this machine."""
    n = parameter_count(config)
    response = config.rollout.max_new_tokens
    tokens = config.episodes_per_batch * config.training.seq_len
    weight_bytes = n * (4 if config.weights_dtype == "float32" else 2)
    # fp32 weights, gradients and two moments; the generator; the reference; logits and activations of a micro-batch
    copies = 16 * n + 4 * n + (4 * n if config.grpo.beta > 0 else 0)
    memory = copies + 64 * config.token_budget * 1024 + 700_000_000
    kept = min(config.steps, config.weights.keep + config.max_staleness + 1 + int(config.gc.grace / 60))
    checkpoints = min(config.checkpoint.keep, 1 + config.steps // max(config.checkpoint.interval, 1)) * 12 * n
    stored = kept * weight_bytes + checkpoints + config.steps * tokens * EPISODE_BYTES_PER_TOKEN
    per_step = (6 + 2 * (config.grpo.beta > 0)) * n * tokens + 2 * n * config.episodes_per_batch * response * 2
    evaluations = 2 + (config.steps // config.eval.interval if config.eval.interval else 0)
    work = config.steps * per_step + evaluations * 4 * n * config.eval.prompts * response
    warm = config.warm_start
    work += 6 * n * warm.steps * warm.batch_size * config.training.seq_len if warm else 0
    return Estimate(n, memory, stored, work / (flops * EFFICIENCY) + config.steps * TASK_SECONDS)


def parameter_count(config: RunConfig) -> int:
    """Parameters of the configured model, from its configuration alone."""
    model = config.model
    if isinstance(model, ScratchModel):
        return _transformer_parameters(model.model_dump(), len(model.vocabulary) + 2)
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
    return _transformer_parameters(shape, hf["vocab_size"])


def _transformer_parameters(m: dict, vocabulary: int) -> int:
    attention = m["hidden_size"] * m["head_dim"] * 2 * (m["num_heads"] + m["num_kv_heads"])
    layer = attention + 3 * m["hidden_size"] * m["intermediate_size"]
    return m["num_layers"] * layer + vocabulary * m["hidden_size"] * (1 if m["tie_word_embeddings"] else 2)


def flops_per_second() -> float:
    """Speed of a 512 x 512 float32 matrix product on this machine's CPU."""
    import torch

    a = torch.ones(512, 512)
    a @ a
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < 0.05:
        a @ a
        count += 1
    return count * 2 * 512**3 / (time.perf_counter() - started)


def _bytes(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"


def _minutes(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{max(1, round(seconds / 60))} minutes"

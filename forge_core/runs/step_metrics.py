"""Metrics that a training step adds to its ledger entry: what needs no model beside ``consumption.data_metrics``.

Invariant: what depends on the machine begins with ``time/``, as everywhere in the ledger; the rest is the same in every
run of the same configuration and seed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from forge_core.runs.consumption import StepData
from forge_core.runs.gpu_speed import peak_flops
from forge_core.store import Store

if TYPE_CHECKING:
    from forge_core.runs.context import RunContext

CONFIG = "config.json"


def fate_metrics(data: StepData) -> dict[str, float]:
    """Advantages, ages and lengths of a batch with its fates."""
    trained = [fate for fate in data.fates if fate.trained]
    advantages, ages = [fate.advantage for fate in trained], [fate.age for fate in trained]
    episodes = data.generated
    found = {
        "advantage/mean": fmean(advantages) if advantages else 0.0,
        "advantage/std": pstdev(advantages) if advantages else 0.0,
        "advantage/max": max(advantages, default=0.0),
        "advantage/min": min(advantages, default=0.0),
        "age/min": float(min(ages, default=0)),
        "generated/episodes": float(len(episodes)),
        **_lengths("prompt", [len(e.prompt_ids) for e in episodes]),
        **_lengths("response", [len(e.response_ids) for e in episodes]),
    }
    return found | {f"age/count/{age}": float(n) for age, n in sorted(Counter(ages).items())}


def _lengths(what: str, tokens: list[int]) -> dict[str, float]:
    found = {f"{what}/max_tokens": float(max(tokens, default=0)), f"{what}/min_tokens": float(min(tokens, default=0))}
    return found if what == "response" else {"prompt/mean_tokens": fmean(tokens) if tokens else 0.0, **found}


def component_spread(data: StepData) -> dict[str, float]:
    """The standard deviation of each component of the reward."""
    graded = [e for e in data.generated if e.reward is not None]
    names = sorted({name for e in graded for name in e.components})
    return {f"reward/{name}/std": pstdev(e.components[name] for e in graded if name in e.components) for name in names}


def trained_lengths(data: StepData) -> list[int]:
    """Tokens, prompt included, of each episode that was trained on."""
    trained = [data.episodes[fate.episode_id] for fate in data.fates if fate.trained]
    return [len(e.prompt_ids) + len(e.response_ids) for e in trained]


def work_metrics(ctx: RunContext, weights: str, lengths: Sequence[float], epochs: int = 1) -> dict[str, float]:
    """What the step computed and published: ``lengths`` are the tokens of each sequence that was trained on, ``epochs``
    how often. The bytes are those of the ``weights`` that it made, or left as they were."""
    files = ctx.store.open_published(weights).manifest.files
    size = sum(file.size for file in files if file.name.endswith(".safetensors"))
    tokens, squares = epochs * sum(lengths), epochs * sum(length * length for length in lengths)
    found = {"weights/bytes": float(size), "trainer/tokens": float(round(tokens))}
    if config := _model_config(ctx.store, ctx.ledger.weights_prefix(0)):
        found["trainer/model_flops"] = model_flops(config, tokens, squares)
    peak = peak_flops(ctx.device("trainer"))
    return found | ({"time/peak_flops": peak * ctx.config.parallelism.ranks} if peak else {})


def model_flops(config: dict[str, Any], tokens: float, squares: float) -> float:
    """Floating-point operations of forward and backward: 6 N + 6 L h T for each token, with N parameters without the
    embedding, L layers of h = heads x head size, and T tokens in its sequence, of which half are looked at (Chowdhery
    et al., PaLM, arXiv 2204.02311, appendix B, which counts all T). ``squares``: the sum of T^2 over sequences.
    Recomputed activations are not counted. ``config``: the model's ``config.json``."""
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
    layer = hidden * (2 * queries + 2 * keys + 3 * config["intermediate_size"])
    weights = layers * layer + hidden * config["vocab_size"]
    return 6.0 * weights * tokens + 6.0 * layers * queries * squares


@lru_cache(maxsize=2)
def _model_config(store: Store, weights: str) -> dict[str, Any]:
    """The model's configuration, as it was published with its weights; empty where there is none."""
    published = store.open_published(weights)
    return json.loads(published.read(CONFIG)) if CONFIG in published.files else {}

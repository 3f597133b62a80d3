"""Which parallel degrees a model can be trained with: checked before anything is loaded.

This file imports neither torch nor the configuration, so that both the run's gate and the trainer can use it.
"""

from __future__ import annotations

from dataclasses import dataclass

TENSOR, PIPELINE = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
DATA = "parallelism.data_parallel_shard_degree"


@dataclass(frozen=True)
class Shape:
    """What a division among ranks depends on."""

    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    n_layers: int
    tied: bool


def degree_problems(shape: Shape, tensor: int, pipeline: int) -> list[str]:
    """Why ``shape`` cannot be divided like this, each naming the key and what would work; empty: it can."""
    found = []
    counts = {"attention heads": shape.n_heads, "key/value heads": shape.n_kv_heads, "hidden units": shape.hidden_dim}
    for what, count in counts.items():
        if count % tensor:
            working = ", ".join(str(d) for d in range(1, tensor) if all(n % d == 0 for n in counts.values()))
            found.append(
                f"{TENSOR}: is {tensor}, which does not divide the model's {count} {what}: use one of {working}"
            )
            break
    if pipeline > 1 and shape.tied:
        found.append(
            f"{PIPELINE}: is {pipeline}, but the model's input and output embeddings are one matrix "
            "(tie_word_embeddings), which the first and the last stage would share: set it to 1, and use "
            "parallelism.data_parallel_shard_degree or parallelism.tensor_parallel_degree"
        )
    elif pipeline > shape.n_layers:
        found.append(f"{PIPELINE}: is {pipeline}, more than the model's {shape.n_layers} layers: use at most that")
    return found

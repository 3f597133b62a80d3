"""Sizes of the configured model, read from its configuration alone: no weights, no engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from forge_core.config.any_config import AnyConfig
from forge_core.config.data_sections import ScratchModel


@dataclass(frozen=True)
class ModelShape:
    """Widths of a dense decoder, in numbers: ``queries`` and ``keys`` are all heads together, ``keys`` those of the
    keys alone (values have as many)."""

    hidden: int
    feed_forward: int
    layers: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool
    qk_norm: bool

    @property
    def layer_parameters(self) -> int:
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.feed_forward)

    @property
    def matrix(self) -> int:
        """Parameters of the embedding, and of the output matrix."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.matrix * (1 if self.tied else 2)


def model_shape(config: AnyConfig) -> ModelShape:
    model = config.model
    if isinstance(model, ScratchModel):
        sizes = model.model_dump()
        return _shape(sizes, model.num_layers, len(model.vocabulary) + 2, model.architecture == "qwen3")
    from forge_core.models.stored import configured_sizes

    hf = json.loads((configured_sizes(config) / "config.json").read_text())
    heads = hf["num_attention_heads"]
    sizes = {
        **hf,
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads", heads),
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        "tie_word_embeddings": hf.get("tie_word_embeddings", False),
    }
    return _shape(sizes, hf["num_hidden_layers"], hf["vocab_size"], hf.get("model_type") == "qwen3")


def _shape(sizes: dict[str, Any], layers: int, vocabulary: int, qk_norm: bool) -> ModelShape:
    return ModelShape(
        hidden=sizes["hidden_size"],
        feed_forward=sizes["intermediate_size"],
        layers=layers,
        queries=sizes["num_heads"] * sizes["head_dim"],
        keys=sizes["num_kv_heads"] * sizes["head_dim"],
        vocabulary=vocabulary,
        tied=sizes["tie_word_embeddings"],
        qk_norm=qk_norm,
    )

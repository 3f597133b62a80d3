"""What a model folder's ``config.json`` says about a dense decoder, and how its tensors are named.

Guarantees:
- Qwen3ForCausalLM, Qwen2ForCausalLM (Qwen2 and 2.5) and LlamaForCausalLM (Llama 2, 3 and SmolLM2) are one
  architecture here, with switches for query/key norms, q/k/v biases and tied embeddings.
- Anything the model code does not compute (sliding windows, other activations, other RoPE scaling, output biases) is an
  error that names the key; nothing is silently left out.
- ``hf_names`` is one-to-one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SUPPORTED = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a dense decoder; ``rope`` is the ``rope_parameters`` section of ``config.json``."""

    name: str
    vocab_size: int
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    rope: dict[str, Any]


def read_architecture(model_dir: Path) -> Architecture:
    """Raises ValueError, naming file and key, for a model that this trainer cannot compute exactly."""
    from transformers import AutoConfig

    path = model_dir / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a model folder needs config.json, safetensors and tokenizer files")
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    name = (config.architectures or ["none"])[0]
    if name not in SUPPORTED:
        raise ValueError(f"{path}: architecture {name} is not supported; supported are {', '.join(SUPPORTED)}")
    _refuse_unsupported(path, name, config)
    return Architecture(
        name=name,
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qk_norm=name == "Qwen3ForCausalLM",
        qkv_bias=name == "Qwen2ForCausalLM",
        rope=dict(config.rope_parameters),
    )


def _refuse_unsupported(path: Path, name: str, config: Any) -> None:
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    for key, value in wanted.items():
        if getattr(config, key, value) != value:
            raise ValueError(f"{path}: {key}={getattr(config, key)} is not supported for {name}; only {value} is")
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ValueError(f"{path}: RoPE scaling {kind!r} is not supported; only 'default' and 'llama3' are")


def inverse_frequencies(arch: Architecture) -> Tensor:
    """RoPE frequencies ``[head_dim / 2]``, float32, in radians per position.

    Source of the scaling: Llama 3.1 (arXiv 2407.21783): frequencies whose wavelength exceeds the original context over
    ``low_freq_factor`` are divided by ``factor``; those below it over ``high_freq_factor`` stay; in between the two are
    interpolated linearly in the number of wavelengths that fit the original context.
    """
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
    frequencies = 1.0 / (arch.rope["rope_theta"] ** exponents)
    if arch.rope.get("rope_type", "default") == "default":
        return frequencies
    low, high = arch.rope["low_freq_factor"], arch.rope["high_freq_factor"]
    fitting = arch.rope["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    kept = ((fitting - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / arch.rope["factor"] + kept * frequencies


def hf_names(arch: Architecture) -> dict[str, str]:
    """Name of each parameter in the trainer's model -> name in Hugging Face files. Tied models have no ``lm_head``."""
    names = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not arch.tied:
        names["lm_head.weight"] = "lm_head.weight"
    for layer in range(arch.n_layers):
        for ours, theirs in _layer_names(arch).items():
            names[f"layers.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    return names


def _layer_names(arch: Architecture) -> dict[str, str]:
    names = {"attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
    names["attention.wo.weight"] = "self_attn.o_proj.weight"
    for letter in "qkv":
        names[f"attention.qkv_linear.w{letter}.weight"] = f"self_attn.{letter}_proj.weight"
        if arch.qkv_bias:
            names[f"attention.qkv_linear.w{letter}.bias"] = f"self_attn.{letter}_proj.bias"
    if arch.qk_norm:
        names |= {f"attention.{n}_norm.weight": f"self_attn.{n}_norm.weight" for n in "qk"}
    projections = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return names | {f"feed_forward.{ours}.weight": f"mlp.{theirs}.weight" for ours, theirs in projections.items()}

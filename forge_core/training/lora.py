"""Low-rank adapters (LoRA, arXiv 2106.09685) by torchtitan's component: ``W x + (alpha / rank) B A x``, ``W`` frozen.

Guarantees:
- Only ``A`` and ``B`` are trained, stored in checkpoints and part of the state digest; a version's weights are
  published merged, so whatever reads a model of a run reads this one too.
- ``A`` starts random and ``B`` zero: the first forward pass is the base model's. ``A`` is a function of seed and name
  alone, whatever ranks share it.
- An adapter is written with the names and the configuration that ``peft`` reads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from forge_core.training.hf_io import copy_part, full_tensor
from forge_core.training.settings import LoraSettings

A, B = ".lora_a.weight", ".lora_b.weight"
PROJECTIONS = {  # what Hugging Face calls a matrix -> the model's name of it, and torchtitan's of its configuration
    "q_proj": ("wq", "wq"),
    "k_proj": ("wk", "wkv"),
    "v_proj": ("wv", "wkv"),
    "o_proj": ("wo", "wo"),
    "gate_proj": ("w1", "w1"),
    "up_proj": ("w3", "w3"),
    "down_proj": ("w2", "w2"),
}


def with_lora(config: Any, lora: LoraSettings) -> Any:
    """torchtitan's model configuration with adapters beside the matrices ``lora.targets``, everything else frozen."""
    from torchtitan.components.lora import LoRAConverter

    targets = sorted({PROJECTIONS[name][1] for name in lora.targets})
    options = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=targets)
    return LoRAConverter(options).convert(config)


@torch.no_grad()
def initialise(trained: Mapping[str, nn.Parameter], seed: int) -> None:
    """Fill the adapters as the first version has them: ``A`` uniform in +-1/sqrt(inputs), ``B`` zero."""
    for name, parameter in sorted(trained.items()):
        if name.endswith(B):
            parameter.zero_()
            continue
        generator = torch.Generator().manual_seed(seed ^ _number(name))
        bound = 1 / math.sqrt(parameter.shape[1])
        copy_part(parameter, torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))


def _number(name: str) -> int:
    """A number of 48 bits that stands for the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])


def merged(name: str, parameter: Tensor, parameters: Mapping[str, Tensor], lora: LoraSettings) -> Tensor:
    """The whole float32 tensor with its adapter added, where it has one; else the parameter as it is."""
    matrix = name.removesuffix(".weight")
    if matrix + A not in parameters:
        return parameter
    a_RI, b_OR = (full_tensor(parameters[matrix + part]).float() for part in (A, B))
    return torch.addmm(full_tensor(parameter).float(), b_OR, a_RI, alpha=lora.alpha / lora.rank)


def write_adapter(
    trained: Mapping[str, nn.Parameter], names: Mapping[str, str], lora: LoraSettings, folder: Path, *, writes: bool
) -> None:
    """``adapter_model.safetensors`` and ``adapter_config.json`` in ``folder``, by the one rank that ``writes``; every
    rank calls it. ``names``: the model's name of each matrix -> Hugging Face's."""
    tensors = {}
    for name, parameter in trained.items():
        matrix, part, _ = name.rsplit(".", 2)
        whole = full_tensor(parameter)
        theirs = names[f"{matrix}.weight"].removesuffix(".weight")
        tensors[f"base_model.model.{theirs}.{part[:-1]}{part[-1].upper()}.weight"] = whole.float().cpu().contiguous()
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lora.base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

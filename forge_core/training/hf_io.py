"""Hugging Face folders into a model.

Guarantees:
- Loading fills every parameter exactly once; a missing, unexpected or misshapen tensor is an error that names it.
- Names are the only difference between the two sides: no tensor is permuted or merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge_core.training.architecture import Architecture, hf_names

INDEX = "model.safetensors.index.json"


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters under names that do not depend on how layers are wrapped (for activation checkpointing)."""
    for name, parameter in model.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered where it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def load_weights(parameters: Mapping[str, nn.Parameter], arch: Architecture, model_dir: Path) -> None:
    """Copy the folder's tensors into ``parameters``, by the model's names (each rank keeps its shard).

    Raises ValueError as the module says.
    """
    known = {theirs: ours for ours, theirs in hf_names(arch).items()}
    waiting = {theirs: parameters[ours] for theirs, ours in known.items() if ours in parameters}
    unexpected = []
    tied_head: Tensor | None = None
    for name, tensor in _tensors(model_dir):
        if name in waiting:
            _copy(waiting.pop(name), tensor, name, model_dir)
        elif name in known:
            continue  # another pipeline stage's
        elif arch.tied and name == "lm_head.weight":
            tied_head = tensor
        elif not name.endswith(
            "rotary_emb.inv_freq"
        ):  # a buffer that old Llama files hold; it follows from config.json
            unexpected.append(name)
    _refuse("lacks", list(waiting), model_dir)
    _refuse("holds unknown", unexpected, model_dir)
    if tied_head is None:
        return
    embedding = parameters["tok_embeddings.weight"]
    if not torch.equal(full_tensor(embedding).cpu(), tied_head.to(embedding.dtype)):
        raise ValueError(
            f"{model_dir} says tie_word_embeddings=true but its lm_head.weight differs from model.embed_tokens.weight: "
            "set tie_word_embeddings to false in config.json"
        )


def _tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _weight_files(model_dir):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if not (model_dir / name).is_file():
            raise ValueError(f"{model_dir / name} does not exist: a model folder needs its weights as safetensors")
    return [model_dir / name for name in names]


def _copy(parameter: Tensor, tensor: Tensor, name: str, model_dir: Path) -> None:
    if parameter.shape != tensor.shape:
        raise ValueError(f"{model_dir}: {name} is {list(tensor.shape)}; config.json makes it {list(parameter.shape)}")
    copy_part(parameter, tensor)


def copy_part(parameter: Tensor, tensor: Tensor) -> None:
    """Copy the whole ``tensor`` into ``parameter``, of which this rank keeps its part without communication."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        parts = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
        parameter.to_local().copy_(tensor[parts])
        return
    parameter.copy_(tensor)


def _refuse(what: str, names: list[str], model_dir: Path) -> None:
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ValueError(f"{model_dir} {what} tensors that its config.json implies otherwise: {shown}")

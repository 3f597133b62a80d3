"""Checkpoints of a trainer in a local folder.

Guarantees:
- A checkpoint holds everything that decides the next step: float32 parameters, optimizer state, the step (which fixes
  the learning rate), torch's random state, and whatever JSON the caller adds.
- Loading is all or nothing in names and shapes: a checkpoint of another model is an error and changes nothing.
- Tensors are in torch's distributed checkpoint format over safetensors: every rank writes its part, and a later run may
  load them with other ranks. No file is a pickle (torch's own format has its index in one).
- Files are written, and later hashed, uploaded and read, side by side, so a rank's share is cut into several; what is
  in memory of them is ``WRITERS`` files, not the share.

Files: ``shard-<rank>-model-<n>-of-<n>.safetensors`` (tensors), ``trainer.json`` (the rest).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from forge_core.training.collectives import gathered
from forge_core.training.hf_export import WRITERS, plan_shards

STATE = "trainer.json"
FILE_BYTES = 250_000_000  # about, of one rank's file
_FORMAT = 2


def save_checkpoint(
    folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], stages: dist.ProcessGroup | None = None
) -> None:
    """Write ``tensors`` and ``state`` (JSON-able, else TypeError) to ``folder``, which is made if need be.

    ``stages``: the group with one rank of each pipeline stage, whose tensors together are those of the checkpoint.
    """
    text = json.dumps({"format": _FORMAT, **state}, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    written = {**tensors, **_random_state()}
    sizes = gathered({name: tensor.numel() * tensor.element_size() for name, tensor in written.items()}, stages)
    files = _files({name: size for part in sizes for name, size in part.items()})
    writer = HuggingFaceStorageWriter(str(folder), files, thread_count=WRITERS, save_distributed=True)
    dcp.save(written, storage_writer=writer)
    if dist.get_rank() == 0:
        (folder / STATE).write_text(text + "\n")


def _files(sizes: dict[str, int]) -> dict[str, int] | None:
    """The number, from 1, of the file that has a rank's part of each tensor; None: one file has all."""
    shards = plan_shards(sizes, FILE_BYTES * dist.get_world_size())
    numbers = {name: number for number, names in enumerate(shards, 1) for name in names}
    return numbers if len(shards) > 1 else None


def load_checkpoint(
    folder: Path, tensors: dict[str, Tensor], stages: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Copy a checkpoint into ``tensors`` in place, restore torch's random state, and return the rest.

    ``stages``: the group with one rank of each pipeline stage, whose tensors together are those of the checkpoint.
    """
    state_file = folder / STATE
    if not state_file.is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no {STATE}")
    state = json.loads(state_file.read_text())
    if state.pop("format") != _FORMAT:
        raise ValueError(f"{state_file} has another format than this release of Forge, which reads format {_FORMAT}")
    stored = _stored_shapes(folder)
    random = {name: value for name, value in _random_state().items() if name in stored}  # none of a GPU from a CPU
    wanted = {**tensors, **random}
    shapes = gathered({name: tuple(tensor.shape) for name, tensor in wanted.items()}, stages)
    _check_same(folder, stored, {name: shape for part in shapes for name, shape in part.items()})
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder), thread_count=WRITERS))
    torch.set_rng_state(random["random.cpu"])
    if "random.cuda" in random:
        torch.cuda.set_rng_state(random["random.cuda"])
    return state


def _random_state() -> dict[str, Tensor]:
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tuple(getattr(metadata, "size", ())) for name, metadata in stored.items()}


def _check_same(folder: Path, stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    names = {name for name in stored if not name.startswith("random.")} | set(wanted)
    different = {name for name in names if stored.get(name) != wanted.get(name)}
    if different:
        shown = ", ".join(sorted(different)[:5])
        raise ValueError(
            f"{folder} holds a checkpoint of another model: {len(different)} tensors differ, such as {shown}"
        )

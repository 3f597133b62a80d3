"""Checkpoints of a trainer in a local folder.

Guarantees:
- A checkpoint holds everything that decides the next step: float32 parameters, optimizer state, the step (which fixes
  the learning rate), torch's random state, and whatever JSON the caller adds.
- Loading is all or nothing in names and shapes: a checkpoint of another model is an error and changes nothing.
- Tensors are in torch's distributed checkpoint format, so a later run may load them with other ranks.

Files: ``.metadata`` and ``__<rank>_<n>.distcp`` (tensors), ``trainer.json`` (the rest).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

STATE = "trainer.json"
_FORMAT = 1


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write ``tensors`` and ``state`` (JSON-able, else TypeError) to ``folder``, which is made if need be."""
    text = json.dumps({"format": _FORMAT, **state}, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save({**tensors, **_random_state()}, storage_writer=dcp.FileSystemWriter(folder))
    if dist.get_rank() == 0:
        (folder / STATE).write_text(text + "\n")


def load_checkpoint(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Copy a checkpoint into ``tensors`` in place, restore torch's random state, and return the rest."""
    state_file = folder / STATE
    if not state_file.is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no {STATE}")
    state = json.loads(state_file.read_text())
    if state.pop("format") != _FORMAT:
        raise ValueError(f"{state_file} has another format than this release of Forge, which reads format {_FORMAT}")
    wanted = {**tensors, **_random_state()}
    _check_same(folder, wanted)
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder))
    torch.set_rng_state(wanted["random.cpu"])
    if "random.cuda" in wanted:
        torch.cuda.set_rng_state(wanted["random.cuda"])
    return state


def _random_state() -> dict[str, Tensor]:
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def _check_same(folder: Path, wanted: dict[str, Tensor]) -> None:
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {name: getattr(metadata, "size", None) for name, metadata in stored.items()}
    different = {name for name in shapes | wanted if name not in wanted or shapes.get(name) != wanted[name].shape}
    if different:
        names = ", ".join(sorted(different)[:5])
        raise ValueError(
            f"{folder} holds a checkpoint of another model: {len(different)} tensors differ, such as {names}"
        )

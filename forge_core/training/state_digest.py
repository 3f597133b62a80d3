"""A digest of all parameters, however they are divided among ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.training.collectives import gathered
from forge_core.training.hf_io import full_tensor, named_parameters


def state_digest(model: nn.Module, stages: dist.ProcessGroup | None) -> str:
    """sha256 over name and float32 bytes of every parameter, in name order: the same on every rank, and the same as of
    one rank with these parameters. ``stages``: the group with one rank of each pipeline stage."""
    digest, hashing = hashlib.sha256(), dist.get_rank() == 0
    for name, tensor in _whole_tensors(model, stages):
        if hashing:
            digest.update(name.encode())
            digest.update(tensor.float().cpu().contiguous().numpy().data)
    found = [digest.hexdigest()]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _whole_tensors(model: nn.Module, stages: dist.ProcessGroup | None) -> Iterator[tuple[str, Tensor]]:
    own = dict(named_parameters(model))
    shapes = gathered({name: (tuple(p.shape), p.dtype) for name, p in own.items()}, stages)
    owners = {name: stage for stage, names in enumerate(shapes) for name in names}
    device = next(iter(own.values())).device
    for name in sorted(owners):
        shape, dtype = shapes[owners[name]][name]
        tensor = full_tensor(own[name]) if name in own else torch.empty(shape, dtype=dtype, device=device)
        if stages is not None:
            dist.broadcast(tensor, dist.get_global_rank(stages, owners[name]), group=stages)
        yield name, tensor

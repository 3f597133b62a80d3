"""A digest of all parameters, however they are divided among ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.training.collectives import gathered
from forge_core.training.hf_io import full_tensor

_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}  # numbers at a time: what a core's cache holds; 128 MiB of int64
_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # those of splitmix64


def state_digest(parameters: Mapping[str, nn.Parameter], stages: dist.ProcessGroup | None) -> str:
    """sha256 over name and fingerprint of every parameter, in name order: the same on every rank and kind of device,
    and the same as of one rank with these parameters. ``stages``: the group with one rank of each pipeline stage."""
    hashing = dist.get_rank() == 0
    names: list[str] = []
    prints: list[Tensor] = []
    group: list[Tensor] = []  # to be mixed together
    for name, tensor in _whole_tensors(parameters, stages):
        if not hashing:
            continue
        names.append(name)
        if sum(t.numel() for t in group) + tensor.numel() > _CHUNK[tensor.device.type]:
            prints += fingerprints(group)
            group = []
        group.append(tensor.detach())
    numbers = torch.stack([*prints, *fingerprints(group)]).tolist() if names else []  # waits for the device only here
    found = [hashlib.sha256(json.dumps([names, numbers]).encode()).hexdigest()]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]


def fingerprints(tensors: list[Tensor]) -> list[Tensor]:
    """Of each tensor 64 bits, as an int64 scalar, of its float32 bits and their places: exact integer arithmetic, so
    equal tensors give equal numbers on any device, and a difference in any bit goes unnoticed once in 2^64.
    The bytes never leave the device. Small tensors are mixed together: a kernel each would cost a GPU's host more.
    """
    if len(tensors) == 1:
        return [_fingerprint(tensors[0])]
    if not tensors:
        return []
    lengths = [tensor.numel() for tensor in tensors]
    bits = torch.cat([_bits(tensor) for tensor in tensors])
    places = torch.cat([torch.arange(length, device=bits.device) for length in lengths])
    return [part.sum() for part in _mixed(bits, places).split(lengths)]


def _fingerprint(tensor: Tensor) -> Tensor:
    bits = _bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    chunk = _CHUNK[bits.device.type]
    for start in range(0, len(bits), chunk):
        part = bits[start : start + chunk]
        total += _mixed(part, torch.arange(start, start + len(part), device=bits.device)).sum()
    return total


def _bits(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous().view(torch.int32).flatten()


def _mixed(bits: Tensor, places: Tensor) -> Tensor:
    mixed = bits.long()
    mixed += places * _ODD[0]
    for odd in _ODD[1:]:
        mixed ^= mixed >> 31
        mixed *= odd  # int64 wraps around
    return mixed ^ (mixed >> 29)


def _whole_tensors(own: Mapping[str, nn.Parameter], stages: dist.ProcessGroup | None) -> Iterator[tuple[str, Tensor]]:
    shapes = gathered({name: (tuple(p.shape), p.dtype) for name, p in own.items()}, stages)
    owners = {name: stage for stage, names in enumerate(shapes) for name in names}
    device = next(iter(own.values())).device
    for name in sorted(owners):
        shape, dtype = shapes[owners[name]][name]
        tensor = full_tensor(own[name]) if name in own else torch.empty(shape, dtype=dtype, device=device)
        if stages is not None:
            dist.broadcast(tensor, dist.get_global_rank(stages, owners[name]), group=stages)
        yield name, tensor

"""A digest of all parameters, however they are divided among ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from forge_core.training.collectives import gathered
from forge_core.training.hf_io import full_tensor

_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}  # numbers at a time: what a core's cache holds; 128 MiB of int64
_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # those of splitmix64


def state_digest(parameters: Mapping[str, nn.Parameter], stages: dist.ProcessGroup | None) -> str:
    """sha256 over name and fingerprint of every parameter, in name order: the same on every rank and kind of device,
    and the same as of one rank with these parameters. ``stages``: the group with one rank of each pipeline stage.
    Raises RuntimeError on every rank where those that each hold a whole parameter hold different ones."""
    if dist.get_world_size() > 1:
        _check_copies(parameters)
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


def _check_copies(parameters: Mapping[str, nn.Parameter]) -> None:
    mine = {name: p for name, p in sorted(parameters.items()) if isinstance(p, DTensor) and _copied(p)}
    prints = fingerprints([p.to_local().detach() for p in mine.values()])
    numbers = torch.stack(prints).tolist() if prints else []
    places = [(name, _place(p)) for name, p in mine.items()]
    found: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for of_rank in gathered(list(zip(places, numbers, strict=True)), dist.group.WORLD):
        for place, number in of_rank:
            found.setdefault(place, set()).add(number)
    if differing := sorted({name for (name, _), numbers in found.items() if len(numbers) > 1}):
        named = ", ".join(differing[:3])
        count = len(differing)
        raise RuntimeError(f"the trainer's ranks hold different numbers in {count} parameters, such as {named}")


def _copied(parameter: DTensor) -> bool:
    """Whether several ranks hold the same part of it."""
    mesh = parameter.device_mesh
    return any(isinstance(p, Replicate) and mesh.size(axis) > 1 for axis, p in enumerate(parameter.placements))


def _place(parameter: DTensor) -> tuple[int, ...]:
    """Which part this rank holds: its coordinates along the axes that divide the parameter."""
    coordinates = parameter.device_mesh.get_coordinate() or ()
    divided = [not isinstance(placement, Replicate) for placement in parameter.placements]
    return tuple(at for at, divides in zip(coordinates, divided, strict=True) if divides)


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

"""A model as a Hugging Face folder, written by all its ranks together.

Guarantees:
- What ``export`` writes loads in ``transformers``: safetensors files of at most ``shard_bytes`` (an index when there
  are several), ``config.json`` with the written type, and every tokenizer file of the source folder.
- Each file is written by one rank; a rank holds the tensors of two files at most, or of as many as ``BUFFER_BYTES``
  has room for.
- Files of weights are handed on as they are written, side by side with the writing of the next.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forge_core.training.architecture import Architecture, hf_names
from forge_core.training.collectives import gathered
from forge_core.training.hf_io import INDEX, full_tensor

_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


WRITERS = 8  # files written at the same time
BUFFER_BYTES = 2 << 30  # of the files that are being written, beyond two
Named = dict[str, Callable[[], Tensor]]  # by name in the files, what gives the tensor


@dataclass(frozen=True)
class Writers:
    """Who writes an export. The ranks of one pipeline stage hold the same tensors and divide the files among
    themselves; ``stages`` is the group with one rank of each stage (None: there is only one)."""

    rank: int = 0
    ranks: int = 1
    stages: ProcessGroup | None = None
    first: bool = True  # writes the index, config.json and the tokenizer files


ALONE = Writers()


@contextmanager
def export(
    parameters: Mapping[str, nn.Parameter],
    arch: Architecture,
    source: Path,
    folder: Path,
    dtype: str,
    shard_bytes: int,
    writers: Writers = ALONE,
    final: Callable[[str, Tensor], Tensor] | None = None,
    each: Callable[[Path], None] | None = None,
) -> Iterator[None]:
    """Write ``parameters``, by the model's names, to ``folder`` in type ``dtype``; configuration and tokenizer files
    come from ``source``. ``final``: what is written in place of a parameter, given its name and itself. ``each``:
    called with every file of weights that this rank has written, from several threads. All of it is there, and these
    calls have ended, once the ``with`` block ends; within it the parameters must stay as they are.

    Every rank calls it, with a folder of its own or a common one: each gathers every tensor and writes its share of the
    files (at least one a rank, where there are as many tensors).
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch_dtype = getattr(torch, dtype)
    known = {theirs: ours for ours, theirs in hf_names(arch).items() if ours in parameters}
    sizes = {theirs: parameters[ours].numel() * torch_dtype.itemsize for theirs, ours in known.items()}
    take = final or (lambda _, parameter: parameter)
    named: Named = {theirs: partial(take, ours, parameters[ours]) for theirs, ours in known.items()}
    plans = gathered((plan_shards(sizes, shard_bytes, writers.ranks), sum(sizes.values())), writers.stages)
    files = _file_names([len(shards) for shards, _ in plans])
    stage = 0 if writers.stages is None else dist.get_rank(writers.stages)
    if writers.first:
        _write_index(plans, files, folder)
        _copy_companions(source, folder, dtype)
    with ThreadPoolExecutor(WRITERS) as pool:
        mine = dict(zip(files[stage], plans[stage][0], strict=True))
        device = next(iter(parameters.values())).device
        written = _write_files(named, mine, folder, torch_dtype, writers, pool, device, each)
        yield
        for file in written:
            file.result()


def _write_index(plans: list[tuple[list[list[str]], int]], files: list[list[str]], folder: Path) -> None:
    """Which file holds which tensor, where there are several."""
    weight_map = {
        name: file
        for (shards, _), names_of_files in zip(plans, files, strict=True)
        for names, file in zip(shards, names_of_files, strict=True)
        for name in names
    }
    if len(set(weight_map.values())) > 1:
        total = sum(size for _, size in plans)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_files(
    named: Named,
    files: dict[str, list[str]],
    folder: Path,
    dtype: torch.dtype,
    writers: Writers,
    pool: Executor,
    device: torch.device,
    each: Callable[[Path], None] | None,
) -> list[Future[None]]:
    """Gather every file's tensors in turn; ``pool`` writes this rank's files while the next are gathered, and after."""
    written: list[tuple[int, Future[None]]] = []  # bytes of each file
    for number, (file, names) in enumerate(files.items()):
        mine = number % writers.ranks == writers.rank
        tensors = {name: _whole(named[name](), dtype, mine) for name in names}
        if not mine:
            continue
        _wait_for_copies(device)
        size = sum(tensor.nbytes for tensor in tensors.values())
        _wait_for_room(written, size)
        written.append((size, pool.submit(_write_file, tensors, folder / file, each)))
    return [future for _, future in written]


def _write_file(tensors: dict[str, Tensor], path: Path, each: Callable[[Path], None] | None) -> None:
    save_file(tensors, path, {"format": "pt"})
    tensors.clear()
    if each is not None:
        each(path)


def _wait_for_copies(device: torch.device) -> None:
    """Return when what was copied from ``device`` is in host memory. (The calling thread's own device may be another,
    and the queue of that one says nothing.)"""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _wait_for_room(written: list[tuple[int, Future[None]]], size: int) -> None:
    """Return when the files in memory are one, or few enough to leave ``size`` bytes of the buffer."""
    unfinished = [(held, future) for held, future in written if not future.done()]
    while len(unfinished) > 1 and size + sum(held for held, _ in unfinished) > BUFFER_BYTES:
        unfinished.pop(0)[1].result()


def _whole(parameter: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    """The tensor in host memory where it is ``wanted``; the others only help to gather it, in the type that is written.
    From a GPU it is on its way when this returns."""
    tensor = full_tensor(parameter.detach().to(dtype))
    if not wanted or not tensor.is_cuda:
        return tensor.contiguous()
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _file_names(counts: list[int]) -> list[list[str]]:
    """Per pipeline stage the names of its files."""
    total = sum(counts)
    if total == 1:
        return [["model.safetensors"] * count for count in counts]
    numbers = iter(range(1, total + 1))
    return [[f"model-{next(numbers):05d}-of-{total:05d}.safetensors" for _ in range(count)] for count in counts]


def plan_shards(sizes: dict[str, int], shard_bytes: int, at_least: int = 1) -> list[list[str]]:
    """Names in order, cut where a file would exceed ``shard_bytes`` (a larger tensor gets a file of its own), into
    ``at_least`` files where there are as many tensors."""
    limit = min(shard_bytes, -(-sum(sizes.values()) // at_least))
    shards = _cut(sizes, limit)
    while len(shards) < min(at_least, len(sizes)):
        limit = limit * 3 // 4
        shards = _cut(sizes, limit)
    return shards


def _cut(sizes: dict[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _copy_companions(source: Path, folder: Path, dtype: str) -> None:
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")

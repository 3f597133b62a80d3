"""Packing documents into micro-batches of bounded size.

Guarantees:
- ``pack`` is a pure function of the samples, their order and its arguments: equal input gives equal tensors.
- Every document lies in one row, whole; ``document_ids`` is its index in ``samples`` and ``position_ids`` restart at 0.
- A micro-batch is ``[rows, row_len]`` with ``rows * row_len <= token_budget``; both are rounded up to four significant
  bits where the budget allows, so a run meets few shapes and pads by at most an eighth in each direction.
- A document of n tokens makes n - 1 predictions, so it occupies n - 1 positions: its last token is only a target.

Layout for any shape (``sizes=0``). Documents are taken longest first (ties in order). The longest one left decides
the row length; the following ones fill its rows, several to a row where they fit. A micro-batch is closed early when
the next document is shorter than a quarter of the row, because dense attention costs ``row_len`` per token: 512
documents of 14 tokens become one ``[512, 13]`` batch and not rows of thousands of tokens under an O(L^2) mask.

Layout for compiled code and GPU kernels (``sizes`` above 0), which want few shapes. One document a row of ``seq_len``
positions where that takes no more micro-batches (it needs no mask); else all documents in one row of ``token_budget``
positions, each document in the first micro-batch that has room, longest first. What fits in a half of the budget, a
quarter and so on, ``sizes`` of them, is one micro-batch of that size: padding is computed like tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forge_core.data_model import TextTrainBatch

PAD_ID = 0  # what callers pad with; any token will do, since padding is masked everywhere
_SIGNIFICANT_BITS = 4
GPU_SIZES = 4
_SHORTEST_SHARE_OF_ROW = 4  # documents below row_len / 4 start a micro-batch of their own
LOGPROBS = ("generator_logprobs", "ref_logprobs", "proximal_logprobs")
_DTYPES: dict[str, type[np.generic]] = {
    "tokens": np.int64,
    "loss_mask": np.bool_,
    "weights": np.float32,
    **dict.fromkeys(LOGPROBS, np.float32),
}


@dataclass(frozen=True)
class Sample:
    """One document. Every column, a list or an array, runs along ``tokens``: entry t belongs to token t.

    ``loss_mask[t]`` says whether predicting token t counts; ``weights[t]`` is its advantage (RL) or weight (SFT).
    ``generator_logprobs``, ``ref_logprobs`` and ``proximal_logprobs`` hold 0.0 where nothing was sampled. Entry 0 never
    counts: nothing predicts the first token. ``crossed``: the weights changed while the response was sampled.
    """

    tokens: list[int] | NDArray[np.int64]
    loss_mask: list[bool] | NDArray[np.bool_]
    weights: list[float] | NDArray[np.float32]
    generator_logprobs: list[float] | NDArray[np.float32] | None = None
    ref_logprobs: list[float] | NDArray[np.float32] | None = None
    proximal_logprobs: list[float] | NDArray[np.float32] | None = None
    crossed: bool = False

    def in_arrays(self) -> Sample:
        """The same document with arrays for lists: they take a fraction of the time to pack and to send to ranks."""
        columns: dict[str, Any] = {name: _column(self, name) for name in _DTYPES if getattr(self, name) is not None}
        return replace(self, **columns)


def _column(sample: Sample, name: str) -> NDArray[Any]:
    values = getattr(sample, name)
    if isinstance(values, np.ndarray):
        return values.astype(_DTYPES[name], copy=False)
    if name == "loss_mask":
        return np.frombuffer(bytes(values), np.bool_)
    return np.fromiter(values, _DTYPES[name], len(values))


@dataclass(frozen=True)
class Layout:
    """Where documents go: ``rows[r]`` are the documents of row r in order, the remaining rows are padding."""

    rows: list[list[int]]
    row_len: int
    height: int


def pack(
    samples: Sequence[Sample], token_budget: int, pad_id: int, seq_len: int, *, sizes: int = 0
) -> list[TextTrainBatch]:
    """Micro-batches of at most ``token_budget`` positions that hold every sample once.

    ``seq_len``: the longest document allowed, in tokens. Raises ValueError when a sample is longer than that or than
    the budget, shorter than two tokens, has lists of different lengths, or when only some have log-probabilities.
    """
    check(samples, token_budget, seq_len)
    layouts = lay_out(samples, range(len(samples)), token_budget, seq_len, sizes=sizes)
    return [build(samples, layout, pad_id) for layout in layouts]


def lay_out(
    samples: Sequence[Sample], members: Iterable[int], token_budget: int, seq_len: int, *, sizes: int
) -> list[Layout]:
    """The micro-batches of the documents ``members`` (indices into ``samples``)."""
    waiting = sorted(members, key=lambda i: -len(samples[i].tokens))  # stable: ties stay in order
    if sizes:
        return _fixed_layouts(samples, waiting, _size(samples, waiting, token_budget, seq_len, sizes), seq_len)
    layouts = []
    while waiting:
        row_len, rows, waiting = _fill(samples, waiting, token_budget)
        layouts.append(Layout(rows, row_len, min(round_up(len(rows)), token_budget // row_len)))
    return layouts


def empty_layout(like: Layout | None) -> Layout:
    """A micro-batch without documents, in the shape of another (None: the smallest)."""
    return Layout([], 1, 1) if like is None else Layout([], like.row_len, like.height)


def sizes_for(device: torch.device, compiled: bool) -> int:
    """How many sizes micro-batches may have: any (0) where no code is made for one; else few. Where the whole model is
    compiled, which takes a minute for each, one."""
    if compiled:
        return 1
    return GPU_SIZES if device.type == "cuda" else 0


def row_sizes(token_budget: int, seq_len: int, sizes: int) -> list[int]:
    """Positions that micro-batches of one row may have, where there are ``sizes`` of them at most; the largest
    first."""
    found = [token_budget >> halvings for halvings in range(sizes)]
    return [size for place, size in enumerate(found) if place == 0 or size >= seq_len]


@dataclass(frozen=True)
class Shape:
    """Of a micro-batch. ``shared``: its only row is for several documents, which needs other kernels."""

    height: int
    row_len: int
    shared: bool


def shapes(token_budget: int, seq_len: int, sizes: int) -> list[Shape]:
    """All the shapes that micro-batches may have with so many ``sizes``, of each size both kinds; the largest first."""
    found = []
    for size in row_sizes(token_budget, seq_len, sizes):
        found += [Shape(1, size, shared=True), Shape(_height(size, seq_len), min(seq_len, size), shared=False)]
    return found


def full_of(sample: Sample, shape: Shape) -> TextTrainBatch:
    """A micro-batch of that ``shape``, full of copies of ``sample``, or of as much of it as has room."""
    room = shape.row_len // 2 if shape.shared else shape.row_len
    document = beginning(sample, room + 1)
    each = shape.row_len // _positions(document) if shape.shared else 1
    rows = [[*range(row * each, (row + 1) * each)] for row in range(shape.height)]
    return build([document] * (each * shape.height), Layout(rows, shape.row_len, shape.height), PAD_ID)


def beginning(sample: Sample, length: int) -> Sample:
    """The first ``length`` tokens of ``sample``, with all that runs along them."""
    columns = {name: getattr(sample, name) for name in ("tokens", "loss_mask", "weights", *LOGPROBS)}
    return replace(sample, **{name: values[:length] for name, values in columns.items() if values is not None})


def round_up(n: int) -> int:
    """The next integer with at most four significant bits: 13 -> 13, 17 -> 18, 100 -> 104, 1025 -> 1152."""
    step = 1 << max(n.bit_length() - _SIGNIFICANT_BITS, 0)
    return -(-n // step) * step


def documents(batches: Sequence[TextTrainBatch]) -> int:
    """How many documents the batches hold (rows, where a batch is not packed)."""
    packed = [b.document_ids for b in batches if b.document_ids is not None]
    rows = sum(len(b.input_ids) for b in batches if b.document_ids is None)
    if not packed:
        return rows
    ids = torch.cat([d.flatten() for d in packed]).unique()
    return rows + int((ids >= 0).sum())


def _positions(sample: Sample) -> int:
    return len(sample.tokens) - 1


def _fill(samples: Sequence[Sample], waiting: list[int], budget: int) -> tuple[int, list[list[int]], list[int]]:
    """Row length, the documents of each row, and the documents left over."""
    row_len = min(round_up(_positions(samples[waiting[0]])), budget)
    rows: list[list[int]] = []
    free = 0
    for taken, index in enumerate(waiting):
        length = _positions(samples[index])
        if length * _SHORTEST_SHARE_OF_ROW < row_len or (length > free and len(rows) == budget // row_len):
            return row_len, rows, waiting[taken:]
        if length > free:
            rows.append([])
            free = row_len
        rows[-1].append(index)
        free -= length
    return row_len, rows, []


def _size(samples: Sequence[Sample], waiting: list[int], budget: int, seq_len: int, sizes: int) -> int:
    """The smallest of ``budget``, its half and so on that holds all documents, and any document; else ``budget``."""
    total = sum(_positions(samples[index]) for index in waiting)
    return next((size for size in reversed(row_sizes(budget, seq_len, sizes)) if size >= total), budget)


def _height(size: int, seq_len: int) -> int:
    """Rows of a micro-batch of ``size`` positions with one document a row."""
    return max(size // seq_len, 1)


def _fixed_layouts(samples: Sequence[Sample], waiting: list[int], budget: int, seq_len: int) -> list[Layout]:
    height = _height(budget, seq_len)
    alone = [waiting[i : i + height] for i in range(0, len(waiting), height)]
    shared: list[list[int]] = []
    free: list[int] = []
    for index in waiting:
        length = _positions(samples[index])
        place = next((i for i, room in enumerate(free) if room >= length), len(free))
        if place == len(free):
            shared.append([])
            free.append(budget)
        shared[place].append(index)
        free[place] -= length
    if len(alone) <= len(shared):
        return [Layout([[index] for index in members], min(seq_len, budget), height) for members in alone]
    return [Layout([members], budget, 1) for members in shared]


def build(samples: Sequence[Sample], layout: Layout, pad_id: int) -> TextTrainBatch:
    """The tensors of one micro-batch."""
    rows, row_len, height = layout.rows, layout.row_len, layout.height
    order = [index for row in rows for index in row]
    lengths = np.array([_positions(samples[index]) for index in order], int)
    starts = np.array([s for row, members in enumerate(rows) for s in _starts(samples, members, row * row_len)], int)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.repeat(starts, lengths) + within
    crossed = np.array([sample.crossed for sample in samples], np.float32)

    def placed(values: NDArray[Any], fill: float, dtype: type[np.generic]) -> torch.Tensor:
        flat: NDArray[Any] = np.full(height * row_len, fill, dtype=dtype)
        flat[places] = values
        return torch.from_numpy(flat.reshape(height, row_len))

    def joined(columns: list[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(columns) if columns else np.empty(0)

    def of_targets(name: str) -> torch.Tensor:
        return placed(joined([_column(samples[index], name)[1:] for index in order]), 0.0, np.float32)

    def logprobs(name: str) -> torch.Tensor | None:
        return None if getattr(samples[0], name) is None else of_targets(name)

    tokens = [_column(samples[index], "tokens") for index in order]
    return TextTrainBatch(
        input_ids=placed(joined([ids[:-1] for ids in tokens]), pad_id, np.int64),
        target_ids=placed(joined([ids[1:] for ids in tokens]), pad_id, np.int64),
        target_mask=of_targets("loss_mask"),
        target_weights=of_targets("weights"),
        generator_logprobs=logprobs("generator_logprobs"),
        ref_logprobs=logprobs("ref_logprobs"),
        position_ids=placed(within, 0, np.int64),
        document_ids=placed(np.repeat(np.array(order, int), lengths), -1, np.int64),
        proximal_logprobs=logprobs("proximal_logprobs"),
        crossed=placed(np.repeat(crossed[order], lengths), 0.0, np.float32) if crossed.any() else None,
    )


def _starts(samples: Sequence[Sample], members: list[int], start: int) -> Iterable[int]:
    """Where each document of a row begins, the row beginning at ``start``."""
    return accumulate((_positions(samples[index]) for index in members[:-1]), initial=start) if members else ()


def check(samples: Sequence[Sample], token_budget: int, seq_len: int) -> None:
    """Raises ValueError as ``pack`` says."""
    for index, sample in enumerate(samples):
        length = len(sample.tokens)
        if not 2 <= length <= seq_len:
            raise ValueError(
                f"sample {index} has {length} tokens; allowed are 2 to seq_len={seq_len}: raise training.seq_len"
            )
        if length - 1 > token_budget:
            raise ValueError(f"sample {index} has {length} tokens, more than token_budget={token_budget}")
        logprobs = [getattr(sample, name) for name in LOGPROBS]
        lists = (sample.loss_mask, sample.weights, *logprobs)
        if any(values is not None and len(values) != length for values in lists):
            raise ValueError(f"sample {index}: every list must have one entry for each of its {length} tokens")
        for name in LOGPROBS:
            if (getattr(sample, name) is None) != (getattr(samples[0], name) is None):
                raise ValueError(f"sample {index} and sample 0 differ in whether they have {name}")

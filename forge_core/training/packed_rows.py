"""The rows of one optimizer step of supervised training: documents that the data loader has packed already.

Guarantees:
- Rank ``r`` of ``n`` takes the rows ``r, r + n, ...``: together the ranks take every row once.
- A micro-batch is ``[rows, seq_len]`` with ``rows * seq_len <= token_budget`` (one row at least), so a run has one
  shape, or two where the last micro-batch of a step is smaller.
- Document numbers are unique over all rows, so whoever has any of them knows what the others cannot be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from forge_core.algorithms.ops import Totals
from forge_core.data_model import TextTrainBatch

if TYPE_CHECKING:
    from forge_core.data.loader import PackedRow


@dataclass(frozen=True)
class PackedRows:
    """Arrays are ``[rows, seq_len]``. ``target_mask``: which targets count; ``positions`` restart at 0 in each
    document; ``document_ids`` number the ``documents`` from 0, padding is -1."""

    input_ids: NDArray[np.int32]
    target_ids: NDArray[np.int32]
    target_mask: NDArray[np.bool_]
    positions: NDArray[np.int32]
    document_ids: NDArray[np.int32]
    documents: int

    @classmethod
    def of(cls, rows: Sequence[PackedRow]) -> PackedRows:
        """The rows, in order."""
        counts = [int(row.document_ids.max(initial=-1)) + 1 for row in rows]
        starts = np.cumsum([0, *counts])
        numbered = [
            np.where(row.document_ids >= 0, row.document_ids + start, -1)
            for row, start in zip(rows, starts[:-1], strict=True)
        ]
        return cls(
            input_ids=np.stack([row.input_ids for row in rows]),
            target_ids=np.stack([row.target_ids for row in rows]),
            target_mask=np.stack([row.target_mask for row in rows]),
            positions=np.stack([row.positions for row in rows]),
            document_ids=np.stack(numbered),
            documents=int(starts[-1]),
        )

    def filled(self, multiple: int) -> PackedRows:
        """With rows of padding at the end, so that ``multiple`` divides their number."""
        missing = -len(self.input_ids) % multiple
        fill = dict.fromkeys(("input_ids", "target_ids", "target_mask", "positions"), 0) | {"document_ids": -1}
        longer: dict[str, Any] = {
            n: np.pad(getattr(self, n), ((0, missing), (0, 0)), constant_values=v) for n, v in fill.items()
        }
        return replace(self, **longer)

    def __len__(self) -> int:
        return self.documents

    @property
    def tokens(self) -> int:
        """Tokens of documents, without padding."""
        return int((self.document_ids >= 0).sum())

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return np.bincount(self.document_ids[self.document_ids >= 0], minlength=self.documents).tolist()

    @property
    def totals(self) -> Totals:
        """The loss's denominators: target tokens of all rows, on whatever rank they are."""
        return Totals(int(self.target_mask.sum()), self.documents)

    def micro_batches(self, rank: int, ranks: int, token_budget: int) -> Iterator[TextTrainBatch]:
        """Those of one rank. Every rank has as many, if the rows can be divided among the ranks."""
        own = np.arange(rank, len(self.input_ids), ranks)
        height = max(1, token_budget // self.input_ids.shape[1])
        for start in range(0, len(own), height):
            yield self._batch(own[start : start + height])

    def _batch(self, rows: NDArray[np.int_]) -> TextTrainBatch:
        def tensor(values: NDArray[np.generic], dtype: type) -> torch.Tensor:
            return torch.from_numpy(values[rows].astype(dtype))

        return TextTrainBatch(
            input_ids=tensor(self.input_ids, np.int64),
            target_ids=tensor(self.target_ids, np.int64),
            target_mask=tensor(self.target_mask, np.float32),
            target_weights=tensor(self.target_mask, np.float32),
            position_ids=tensor(self.positions, np.int64),
            document_ids=tensor(self.document_ids, np.int64),
        )

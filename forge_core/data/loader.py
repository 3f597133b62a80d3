"""Endless packed rows for supervised fine-tuning.

Guarantees:
- The order of rows is one global sequence: a pure function of the data, the settings, the tokenizer, ``seq_len`` and
  the seed. Neither workers nor ranks change it; ``rank_rows`` says which rows of a global batch a rank takes.
- ``load_state_dict(state_dict())`` of any loader of the same data and settings goes on with the row that would have
  come next. A state is JSON-able. One of other data, settings, tokenizer or seed is a DataError that names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from forge_core.data.sft_settings import SftDataConfig

Side = Literal["train", "validation"]
T = TypeVar("T")


@dataclass(frozen=True)
class PackedRow:
    """One training row; all arrays are ``[seq_len]``. A document of n tokens occupies n - 1 positions."""

    input_ids: np.ndarray  # int32
    target_ids: np.ndarray  # int32: the token after input_ids[t] in its document
    target_mask: np.ndarray  # bool: whether predicting target_ids[t] counts in the loss
    positions: np.ndarray  # int32: position within the document, from 0
    document_ids: np.ndarray  # int32: which document of the row, from 0; -1: padding


class Loader(Protocol):
    """An endless iterator of rows."""

    def __iter__(self) -> Iterator[PackedRow]: ...
    def __next__(self) -> PackedRow: ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; after ``load_state_dict`` the next row is the one that would have come."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Raises DataError when it belongs to other data, settings, tokenizer or seed."""

    def metrics(self) -> dict[str, float]:
        """Totals of all rows given so far, ``dataset/<label>/...`` and ``packing/...``; part of the state."""

    def close(self) -> None:
        """End the worker processes, if there are any."""


def build_loader(section: SftDataConfig, tokenizer: Any, seq_len: int, *, seed: int, key: str = "dataset") -> Loader:
    """The training rows of ``section`` (without those that ``holdout`` holds out). Raises DataError.

    ``tokenizer``: of transformers, a fast one. ``key``: the section's name in errors.
    """
    raise NotImplementedError


def finite_rows(
    section: SftDataConfig, tokenizer: Any, seq_len: int, *, side: Side = "validation", key: str = "dataset"
) -> Iterator[PackedRow]:
    """One pass over the documents of one side of ``holdout``, unshuffled, packed as in training: for validation.

    With ``holdout`` 0 all documents are on either side: give a section of another split or file for validation.
    A mixture is read set by set, each once. Raises DataError, also when there is no document at all.
    """
    raise NotImplementedError


def rank_rows(rows: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """The rows of a global batch that belong to ``rank``. Raises ValueError when they cannot be shared evenly."""
    if len(rows) % ranks:
        raise ValueError(f"a global batch of {len(rows)} rows cannot be shared evenly by {ranks} ranks")
    return rows[rank::ranks]


def check_sft_data(section: SftDataConfig, *, key: str = "dataset") -> None:
    """Find what is wrong with ``section`` before a model is loaded: at most one row of a file is read. DataError."""
    raise NotImplementedError

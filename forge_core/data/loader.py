"""Endless packed rows for supervised fine-tuning.

Guarantees:
- The order of rows is one global sequence: a pure function of the data, the settings, the tokenizer, ``seq_len`` and
  the seed. Workers do not change it, and ranks share its rows (``training/packed_rows.py``).
- ``load_state_dict(state_dict())`` of any loader of the same data and settings goes on with the row that would have
  come next. A state is JSON-able. One of other data, settings, tokenizer or seed is a DataError that names them.

How: examples are drawn in chunks; a window is so many whole chunks that they fill ``packing_window`` rows, and its rows
are packed on their own. So a state is where the window's first chunk began, and how many of its rows were given: what
waits in a packing buffer is made again, and a state holds no token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from forge_core.data.documents import Documents, Drawn, State, derived_seed
from forge_core.data.encoding import Document, Encoder
from forge_core.data.encoding_pool import EncodingPool, encoding_pool
from forge_core.data.errors import DataError
from forge_core.data.loader_identity import check_same, identity
from forge_core.data.prompts import held_out, prompt_id
from forge_core.data.row_packing import PackedRow, arrange, build_row
from forge_core.data.row_statistics import Statistics
from forge_core.data.sft_settings import SftDataConfig
from forge_core.data.sft_sources import check_sft_data, maskings, open_documents

__all__ = ["Loader", "PackedRow", "build_loader", "check_sft_data", "finite_rows"]

CHUNK = 64  # examples that are drawn and encoded together
FRUITLESS_EPOCHS = 2  # epochs of a set without one usable document, after which nothing will ever come
Side = Literal["train", "validation"]


class Loader(Protocol):
    """An endless iterator of rows."""

    def __iter__(self) -> Iterator[PackedRow]: ...
    def __next__(self) -> PackedRow: ...

    def state_dict(self) -> State:
        """JSON-able; after ``load_state_dict`` the next row is the one that would have come."""

    def load_state_dict(self, state: State) -> None:
        """Go on from ``state``. Raises DataError when it belongs to other data, settings, tokenizer or seed."""

    def metrics(self) -> dict[str, float]:
        """Totals of all rows given so far, ``dataset/<label>/...`` and ``packing/...``; part of the state."""

    def close(self) -> None:
        """End the worker processes, if there are any."""


def build_loader(section: SftDataConfig, tokenizer: Any, seq_len: int, *, seed: int, key: str = "dataset") -> Loader:
    """The training rows of ``section`` (without those that ``holdout`` holds out). Raises DataError.

    ``tokenizer``: of transformers, a fast one. ``key``: the section's name in errors.
    """
    encoder = _encoder(section, tokenizer, seq_len)
    documents = open_documents(section, seed, key)
    return _RowLoader(section, documents, encoder, seq_len, seed, key)


def finite_rows(
    section: SftDataConfig, tokenizer: Any, seq_len: int, *, side: Side = "validation", key: str = "dataset"
) -> Iterator[PackedRow]:
    """One pass over the documents of one side of ``holdout``, in the order of the data, packed as in training.

    With ``holdout`` 0 all documents are on either side: give a section of another split or file for validation.
    A mixture is read set by set, each once. Raises DataError, also when there is no document at all.
    """
    encoder = _encoder(section, tokenizer, seq_len)
    masking = maskings(section)
    window: list[Document] = []
    given = False
    for drawn in open_documents(section, 0, key).once():
        if _on_side(drawn, section.holdout, side):
            document = encoder(drawn.example, masking[drawn.label])
            window += [document] * (len(document.tokens) > 0)
        if sum(len(document.tokens) - 1 for document in window) >= section.packing_window * seq_len:
            yield from _rows(window, section.pack, seq_len)
            window, given = [], True
    yield from _rows(window, section.pack, seq_len)
    if not window and not given:
        raise DataError(f"{key}: no document is left for {side}: use a larger set, or a larger {key}.holdout")


@dataclass(frozen=True)
class _Chunk:
    """Examples that are being encoded. ``before``: the state of the stream before they were drawn."""

    before: State
    drawn: list[Drawn]
    documents: Callable[[], list[Document]]


class _RowLoader:
    def __init__(
        self, section: SftDataConfig, documents: Documents, encoder: Encoder, seq_len: int, seed: int, key: str
    ) -> None:
        self._section, self._documents, self._key = section, documents, key
        self._seq_len, self._seed = seq_len, derived_seed(seed, "rows")
        self._masking = maskings(section)
        self._identity = identity(section, documents, encoder.tokenizer, seq_len, seed)
        self._pool: EncodingPool = encoding_pool(encoder, section.workers)
        self._statistics = Statistics(key, section.truncation, seq_len)
        self._begin_at({"window": 0, "row": 0, "position": documents.state()})

    def __iter__(self) -> Iterator[PackedRow]:
        return self

    def __next__(self) -> PackedRow:
        while self._row == len(self._rows):
            self._next_window(count=True)
        members = self._rows[self._row]
        self._row += 1
        found = [self._window[i] for i in members]
        drawn, documents = [drawn for drawn, _ in found], [document for _, document in found]
        self._statistics.give(drawn, documents, self._epochs[self._row - 1])
        return build_row(documents, self._seq_len)

    def state_dict(self) -> State:
        if self._row == len(self._rows):
            place = {"window": self._number, "row": 0, "position": self._upcoming()}
        else:
            place = {"window": self._number - 1, "row": self._row, "position": self._window_began}
        return {"identity": self._identity, "statistics": self._statistics.state(), **place}

    def load_state_dict(self, state: State) -> None:
        check_same(state.get("identity"), self._identity, self._key)
        self._documents.load(state["position"])
        self._begin_at(state)
        self._statistics.load(state["statistics"])
        if state["row"]:
            self._next_window(count=False)
            self._row = state["row"]

    def metrics(self) -> dict[str, float]:
        return self._statistics.metrics()

    def close(self) -> None:
        self._pool.close()

    def _begin_at(self, state: State) -> None:
        """Be before the window that ``state`` names; the stream of documents is there already."""
        self._number: int = state["window"]
        self._window_began: State = state["position"]
        self._chunks: deque[_Chunk] = deque()
        self._window: list[tuple[Drawn, Document]] = []
        self._rows: list[list[int]] = []
        self._epochs: list[dict[str, int]] = []
        self._row = 0
        self._ahead = self._pool.ahead

    def _upcoming(self) -> State:
        """Where the next window begins."""
        return self._chunks[0].before if self._chunks else self._documents.state()

    def _next_window(self, *, count: bool) -> None:
        """Pack the next window. ``count``: its documents that are left out were not counted before."""
        self._window_began = self._upcoming()
        self._window, filled, used = [], 0, 0
        first: dict[str, int] = {}
        while filled < self._section.packing_window * self._seq_len:
            chunk = self._next_chunk()
            used += 1
            for drawn, document in zip(chunk.drawn, chunk.documents(), strict=True):
                if len(document.tokens):
                    self._window.append((drawn, document))
                    filled += len(document.tokens) - 1 if self._section.pack else self._seq_len
                elif count:
                    self._statistics.leave_out(drawn, document)
                if not self._window and drawn.epoch >= first.setdefault(drawn.label, drawn.epoch) + FRUITLESS_EPOCHS:
                    raise DataError(f"{self._key}: no document can be used: {self._statistics.left_out_text()}")
        if self._section.workers:  # the next window is encoded while the rows of this one are trained on
            self._ahead = max(self._pool.ahead, used)
            self._begin_chunks()
        self._rows = _layout([d for _, d in self._window], self._section.pack, self._seq_len, self._seed, self._number)
        self._epochs = _epochs([[self._window[i][0] for i in members] for members in self._rows])
        self._number += 1
        self._row = 0

    def _next_chunk(self) -> _Chunk:
        self._begin_chunks()
        return self._chunks.popleft()

    def _begin_chunks(self) -> None:
        """Have ``_ahead`` chunks drawn and begun, so that workers never wait for this process."""
        while len(self._chunks) < self._ahead:
            before = self._documents.state()
            drawn = [self._draw() for _ in range(CHUNK)]
            jobs = [(one, self._masking[one.label]) for one in drawn]
            self._chunks.append(_Chunk(before, drawn, self._pool.submit(jobs)))

    def _draw(self) -> Drawn:
        """The next example that is not held out."""
        first: dict[str, int] = {}
        while not _on_side(drawn := self._documents.draw(), self._section.holdout, "train"):
            if drawn.epoch >= first.setdefault(drawn.label, drawn.epoch) + FRUITLESS_EPOCHS:
                raise DataError(f"{self._key}.holdout: every document of {drawn.label} is held out: use a smaller one")
        return drawn


def _encoder(section: SftDataConfig, tokenizer: Any, seq_len: int) -> Encoder:
    return Encoder(tokenizer, seq_len + 1, section.chat_template, section.truncation)


def _on_side(drawn: Drawn, holdout: float, side: Side) -> bool:
    if holdout == 0:
        return True
    return held_out(prompt_id(drawn.example.before_reply), holdout) == (side == "validation")


def _epochs(rows: Sequence[Sequence[Drawn]]) -> list[dict[str, int]]:
    """For each row of a window, the earliest epoch of each set that it and the rows after it hold. (A window may hold
    several epochs of a small set, and its rows are shuffled.)"""
    found: list[dict[str, int]] = []
    earliest: dict[str, int] = {}
    for drawn in reversed(rows):
        for one in drawn:
            earliest[one.label] = min(one.epoch, earliest.get(one.label, one.epoch))
        found.append(dict(earliest))
    return found[::-1]


def _layout(documents: Sequence[Document], pack: bool, seq_len: int, seed: int, window: int) -> list[list[int]]:
    if not pack:
        return [[i] for i in range(len(documents))]
    return arrange([len(document.tokens) - 1 for document in documents], seq_len, seed, window)


def _rows(documents: Sequence[Document], pack: bool, seq_len: int) -> Iterator[PackedRow]:
    for members in _layout(documents, pack, seq_len, 0, 0):
        yield build_row([documents[i] for i in members], seq_len)

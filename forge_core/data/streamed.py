"""Examples of a set that is read piece by piece: never more of it is in memory than one block.

Guarantees: those of ``documents``. ``datasets`` alone cannot go on exactly within a shuffled stream (what its buffer
held is lost), so blocks are read in order and shuffled here; a state is where the block began, and how far it went.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from forge_core.data.conversations import Converter
from forge_core.data.cursor import permutation
from forge_core.data.documents import Drawn, State, derived_seed
from forge_core.data.errors import DataError
from forge_core.data.sources import Row

START = {"epoch": 0, "block": 0, "shard": 0, "rows": 0, "stream": None, "index": 0}


class StreamedDocuments:
    """A ``datasets.IterableDataset``. ``size``: rows of an epoch, the first ones (None: all)."""

    def __init__(
        self,
        label: str,
        stream: Any,
        convert: Converter,
        seed: int,
        shuffle: bool,
        buffer: int,
        size: int | None,
        key: str,
    ) -> None:
        self.label, self._stream, self._convert = label, stream, convert
        self._seed, self._buffer, self._size = derived_seed(seed, label), buffer, size
        self._shuffle, self._key = shuffle, key
        self.load(START)

    def draw(self) -> Drawn:
        if self._index == len(self._block):
            self._next_block()
        number, row = self._block[self._index]
        self._index += 1
        return Drawn(self.label, self._start["epoch"], self._convert(number, row))

    def state(self) -> State:
        return {**self._start, "index": self._index}

    def load(self, state: State) -> None:
        """Reads the block that the state is in, unless nothing was drawn yet."""
        self._begin_at(state)
        self._block: list[tuple[int, Row]] = []
        self._index = 0
        if state["index"]:
            self._read_block()
            self._index = state["index"]

    def once(self) -> Iterator[Drawn]:
        rows = islice(iter(self._stream), self._size)
        return (Drawn(self.label, 0, self._convert(i, row)) for i, row in enumerate(rows))

    def fingerprint(self) -> State:
        """The number of shards: nothing more is known without reading the set."""
        return {self.label: {"shards": self._stream.num_shards}}

    def _begin_at(self, state: State) -> None:
        """Be where ``state`` says its block begins."""
        self._start = {**state, "index": 0}
        self._shard, self._rows = state["shard"], state["rows"]
        self._open(state["stream"])

    def _open(self, position: State | None) -> None:
        """Open the shard that is next in this epoch, at ``position`` (None: its beginning)."""
        order = self._shards(self._start["epoch"])
        self._reader = self._stream.shard(num_shards=len(order), index=order[self._shard])
        if position is not None:
            self._reader.load_state_dict(position)
        self._iterator = iter(self._reader)

    def _shards(self, epoch: int) -> list[int]:
        """The order of the shards: as they are where not all of the set is used, else a set's "first rows" change."""
        count = self._stream.num_shards
        shuffled = self._shuffle and self._size is None
        return permutation(count, self._seed, epoch).tolist() if shuffled else list(range(count))

    def _next_block(self) -> None:
        """The block behind this one; at the end of the epoch, the first of the next."""
        begun = bool(self._block)
        self._start = {
            **self._start,
            "block": self._start["block"] + begun,
            "shard": self._shard,
            "rows": self._rows,
            "stream": self._reader.state_dict(),
        }
        self._read_block()
        if not self._block:
            if self._rows == 0:
                raise DataError(f"{self._key}.path: an epoch of {self.label} has no rows: the set changed meanwhile")
            self._begin_at({**START, "epoch": self._start["epoch"] + 1})
            self._read_block()

    def _read_block(self) -> None:
        rows = [(self._rows + i, row) for i, row in enumerate(self._read())]
        self._rows += len(rows)
        if self._shuffle and rows:
            order = permutation(len(rows), self._seed, f"{self._start['epoch']}:{self._start['block']}")
            rows = [rows[i] for i in order]
        self._block, self._index = rows, 0

    def _read(self) -> list[Row]:
        """The rows of the next block. Errors of the network stay what they are: what failed may be tried again."""
        from datasets.exceptions import DatasetsError

        try:
            return list(islice(self._epoch(), self._wanted()))
        except (ValueError, DatasetsError) as error:
            raise DataError(
                f"{self._key}.path: {self.label} cannot be read behind row {self._rows} of its epoch: {error}"
            ) from error

    def _wanted(self) -> int:
        return self._buffer if self._size is None else min(self._buffer, self._size - self._rows)

    def _epoch(self) -> Iterator[Row]:
        """The rest of the epoch, shard by shard."""
        while True:
            for row in self._iterator:  # noqa: UP028  "yield from" would close the reader together with this block
                yield row
            if self._shard + 1 == self._stream.num_shards:
                return
            self._shard += 1
            self._open(None)

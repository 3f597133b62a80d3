"""The rows that a supervised run trains on, step by step.

Invariants:
- What a training step takes follows from the cursor of the ledger entry before it alone: taken again, in a replay or
  after a crash, it takes the same rows.
- The cursor is the data loader's own state, of all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from forge_core.config.sft_config import SftConfig
from forge_core.data.loader import Loader, build_loader, finite_rows
from forge_core.stop import StopToken
from forge_core.store import Ledger
from forge_core.training.packed_rows import PackedRows


@dataclass(frozen=True)
class Taken:
    """What one training step took: ``cursor`` is where the next one begins; ``tokens`` are those of documents,
    ``targets`` those that count in the loss, ``lengths`` the tokens of each document; ``metrics`` are the loader's."""

    cursor: dict[str, Any]
    documents: int
    tokens: int
    targets: int
    positions: int
    lengths: list[int]
    metrics: dict[str, float]


class RowSource:
    """The training rows of a run; one thread at a time uses it. Raises DataError when the data, or what decides how
    they become rows, are not those of the run's first step."""

    def __init__(self, config: SftConfig, tokenizer: Any, ledger: Ledger, stop: StopToken) -> None:
        assert config.dataset is not None
        self._config, self._ledger, self._stop = config, ledger, stop
        self._loader: Loader = build_loader(
            config.dataset, tokenizer, config.training.seq_len, seed=config.run.seed, key="dataset"
        )
        self._first = self._loader.state_dict()
        self._next: int | None = 0  # the training step that the loader stands before; None: in the middle of one
        if ledger.head() > 0:  # before anything is replayed: are these the data that the run began with?
            self._loader.load_state_dict(ledger.required(0)["cursor"])
            self._next = 1
        self._taken: dict[int, Taken] = {}

    def step(self, batch: int) -> Iterator[PackedRows]:
        """The rows of each optimizer step of training step ``batch``, which has taken them when this ends. Raises
        DataError, Stopped."""
        self._seek(batch)
        self._next, parts, lengths = None, [], list[int]()
        for _ in range(self._config.training.sync_interval):
            rows = PackedRows.of([self._row() for _ in range(self._config.rows_per_optimizer_step)])
            parts.append((len(rows), rows.tokens, rows.totals.tokens, rows.input_ids.size))
            lengths += rows.lengths
            yield rows
        self._next = batch + 1
        documents, tokens, targets, positions = (sum(part) for part in zip(*parts, strict=True))
        cursor, metrics = self._loader.state_dict(), self._loader.metrics()
        self._taken = {batch: Taken(cursor, documents, tokens, targets, positions, lengths, metrics)}

    def taken(self, batch: int) -> Taken:
        """What training step ``batch``, the last one, took."""
        return self._taken[batch]

    def close(self) -> None:
        self._loader.close()

    def _seek(self, batch: int) -> None:
        if self._next != batch:
            self._loader.load_state_dict(self._ledger.required(batch - 1)["cursor"] if batch else self._first)

    def _row(self) -> Any:
        self._stop.check()
        return next(self._loader)


def validation_rows(config: SftConfig, tokenizer: Any) -> PackedRows:
    """The rows that every validation of a run computes the loss of. Raises DataError when there are none."""
    section, key = config.validation.dataset, "validation.dataset"
    if section is None:
        assert config.dataset is not None
        section, key = config.dataset, "dataset"
    rows = finite_rows(section, tokenizer, config.training.seq_len, side="validation", key=key)
    found = PackedRows.of(list(islice(rows, config.validation.rows)))
    return found.filled(config.parallelism.data_parallel_shard_degree)

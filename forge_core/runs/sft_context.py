"""Everything one process holds of a supervised run: a run's context (``context.py``) whose only engine is the trainer,
and its data loader."""

from __future__ import annotations

from forge_core.config.sft_config import SftConfig
from forge_core.devices import Placement, place_trainer
from forge_core.once import once
from forge_core.runs.context import RunContext
from forge_core.runs.record import RunRecord
from forge_core.runs.sft_rows import RowSource, validation_rows
from forge_core.runs.sft_session import SftTrainerSession
from forge_core.runs.turns import NoTurns
from forge_core.stop import StopToken
from forge_core.store import Store
from forge_core.training.launch import node_count
from forge_core.training.packed_rows import PackedRows


class SftContext(RunContext):
    """``sft`` is the configuration."""

    samples = False

    def __init__(self, store: Store, record: RunRecord, stop: StopToken | None = None) -> None:
        super().__init__(store, record, stop)
        self.sft = sft_config(record)

    @once
    def placement(self) -> Placement:
        return self._leased(lambda gpus: place_trainer(self.sft, gpus, nodes=node_count()))

    @once
    def turns(self) -> NoTurns:
        return NoTurns()

    @once
    def trainer(self) -> SftTrainerSession:
        return SftTrainerSession(self)

    @once
    def rows(self) -> RowSource:
        """The training rows."""
        return RowSource(self.sft, self.tokenizer, self.ledger, self.stop)

    @once
    def validation(self) -> PackedRows | None:
        """The rows that the loss is validated on; None where nothing is."""
        return validation_rows(self.sft, self.tokenizer) if self.sft.validates else None

    def close(self) -> None:
        super().close()
        if "rows" in self.__dict__:
            self.__dict__.pop("rows").close()


def sft_config(record: RunRecord) -> SftConfig:
    """The configuration of a supervised run."""
    assert isinstance(record.config, SftConfig), f"{record.run_id} is a run of the kind {record.flow}"
    return record.config

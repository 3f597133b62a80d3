"""The session of a supervised run: as any other (``session.py``), with its own checks, engines and display.

Invariant: the final state asks the store nothing, so no outage takes the place of how the run ended.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

from prefect import runtime
from prefect.states import Completed, State
from rich.table import Table

from flows.artifacts import RunArtifacts
from flows.session import Kind, Session, name_of_run, session_of_new, session_of_stored
from forge_core.config.overrides import Overrides
from forge_core.config.sft_config import SftConfig
from forge_core.config.sft_loader import load_sft_config
from forge_core.observability.sft_progress import COLUMNS, SftProgress, sft_table, sft_title
from forge_core.report.figures import curves_of, live
from forge_core.runs.early_end import EarlyEnd
from forge_core.runs.record import RunRecord
from forge_core.runs.sft_checks import check_sft, with_stored_sft_model
from forge_core.runs.sft_context import SftContext, sft_config
from forge_core.runs.versions import best_version
from forge_core.store import Store


def sft_run_name() -> str:
    """Name of a supervised flow run."""
    return name_of_run(SFT)


def new_sft_session(config: SftConfig | str, overrides: dict[str, Any]) -> SftSession:
    """``session_of_new`` of a supervised run."""
    session: SftSession = session_of_new(SFT, config, overrides)
    return session


def resumed_sft_session(
    run_id: str, store_root: str, overrides: Overrides, allow_keys: list[str], allow_code: bool
) -> SftSession:
    """``session_of_stored`` of a supervised run."""
    session: SftSession = session_of_stored(SFT, run_id, store_root, overrides, allow_keys, allow_code)
    return session


class SftSession(Session):
    figures = staticmethod(partial(curves_of, supervised=True))
    _ended_early: str | None = None  # how, once the run has

    def __init__(self, store: Store, record: RunRecord) -> None:
        super().__init__(store, record)
        self.window.last = "fine-tune"
        flow_run, steps = runtime.flow_run.id, self.config.steps
        drawn = partial(live, store, record.run_id, supervised=True)
        self._artifacts = RunArtifacts(self._best_effort, flow_run, record.run_id, steps, COLUMNS, drawn)
        self._progress = SftProgress(record.run_id, steps, console=self._console)

    def _opened(self, store: Store, record: RunRecord) -> SftContext:
        return SftContext(store, record, self.stop)

    @cached_property
    def _early_end(self) -> EarlyEnd:
        return EarlyEnd(self._context.ledger)

    def enough(self) -> bool:
        """Whether the validation loss has stopped falling."""
        if not self._early_end.reached(sft_config(self._context.record)):
            return False
        head, best = self._context.ledger.head(), best_version(self._context.store, self.run.run_id)
        self._ended_early = f"{head} {self.done}: the validation loss is lowest for version {best.version}"
        return True

    def _final_state(self, error: BaseException | None) -> State[Any]:
        if error is not None or self._ended_early is None:
            return super()._final_state(error)
        return Completed(message=self._ended_early)

    def _table(self, entries: list[dict[str, Any]]) -> Table:
        return sft_table(entries, sft_title(entries), self.run.run_id)


SFT = Kind("sft", load_sft_config, check_sft, sft_config, with_stored_sft_model, SftSession)

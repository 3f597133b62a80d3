"""The session of a supervised run: as any other (``session.py``), with its own checks, engines and display."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from prefect import runtime
from prefect.states import Completed, State

from flows.artifacts import RunArtifacts
from flows.restarting import flow_run_id, is_deployed, started_before, with_run_id
from flows.session import Session
from forge_core.config import ConfigError, store_uri
from forge_core.config.overrides import Overrides
from forge_core.config.sft_config import SftConfig
from forge_core.config.sft_loader import load_sft_config
from forge_core.observability.sft_progress import COLUMNS, SftProgress, loss_curve_png, sft_table, sft_title
from forge_core.runs.early_end import ends_early, validation_losses
from forge_core.runs.record import RunRecord, create_run, load_run, resume_check, resume_run
from forge_core.runs.sealing import seal
from forge_core.runs.sft_checks import check_sft, with_stored_sft_model
from forge_core.runs.sft_context import SftContext, sft_config
from forge_core.runs.versions import best_version
from forge_core.stop import StopToken
from forge_core.store import Store, open_store

checks_log = logging.getLogger("forge.checks")  # its own, since the command line has said the same before


def sft_run_name() -> str:
    """Name of the flow run in the UI: the run's id."""
    config, overrides = (runtime.flow_run.parameters[name] for name in ("config", "overrides"))
    try:
        return str(with_run_id(load_sft_config(config, overrides or {}), "sft").run.id)
    except ConfigError:  # the flow says what is wrong
        return "sft"


def new_sft_session(config: SftConfig | str, overrides: dict[str, Any]) -> SftSession:
    """A session of a new run, or of the run that an earlier start of this flow run has made.

    Raises ConfigError before anything is stored or loaded.
    """
    config = with_run_id(load_sft_config(config, overrides), "sft")
    assert config.run.id is not None
    store = open_store(store_uri(None, config))
    if started_before(store, config.run.id):
        return resumed_sft_session(config.run.id, store.uri, [], [], False)
    for warning in check_sft(config):
        checks_log.warning(warning)
    return SftSession(store, create_run(store, config, flow_run=flow_run_id()))


def resumed_sft_session(
    run_id: str, store_root: str, overrides: Overrides, allow_keys: list[str], allow_code: bool
) -> SftSession:
    """A session that goes on with a stored run. Raises ConfigError naming every difference not allowed."""
    store = open_store(store_root)
    record = load_run(store, run_id)
    config = load_sft_config(sft_config(record), overrides)
    changed, _ = resume_check(store, record, config, allow_keys, allow_code)  # before any code of the run is imported
    for warning in check_sft(with_stored_sft_model(store, run_id, config)):
        checks_log.warning(warning)
    if changed:
        seal(store, record, StopToken())
    return SftSession(store, resume_run(store, record, config, allow_keys, allow_code))


class SftSession(Session):
    def __init__(self, store: Store, record: RunRecord) -> None:
        super().__init__(store, record)
        self.window.last = "fine-tune"
        flow_run, steps = runtime.flow_run.id, self.config.steps
        self._artifacts = RunArtifacts(
            self._best_effort, flow_run, record.run_id, steps, COLUMNS, ("loss", loss_curve_png)
        )
        self._progress = SftProgress(record.run_id, steps, console=self._console)

    def _opened(self, store: Store, record: RunRecord) -> SftContext:
        return SftContext(store, record, self.stop)

    def first_batch(self) -> int:
        """The first training step that is not committed."""
        entries = self._context.ledger.entries()
        self._progress.start(entries)
        return len(entries)

    def enough(self) -> bool:
        """Whether the validation loss has stopped falling."""
        return ends_early(sft_config(self._context.record), validation_losses(self._context.ledger.entries()))

    def _final_state(self, error: BaseException | None) -> State[Any]:
        head = self._context.ledger.head()
        if error is not None or head >= self.config.steps:
            return super()._final_state(error)
        best = best_version(self._context.store, self.run.run_id)
        return Completed(message=f"{head} {self.done}: the validation loss is lowest for version {best.version}")

    def _show_result(self) -> None:
        """The closing table, and the loss curve as a file and as an artifact."""
        entries = self._context.ledger.entries()
        if entries:
            self._artifacts.finish(entries)
            self._console.print(sft_table(entries, sft_title(entries)))
            if not is_deployed():  # a deployment's working directory is the code's
                self._best_effort.submit(self._write_curve, entries)
        self._best_effort.close(10.0)

    def _write_curve(self, entries: list[dict[str, Any]]) -> None:
        curve = Path(f"{self.run.run_id}-loss.png").absolute()
        loss_curve_png(entries, curve)
        self._progress.note(f"loss curve: {curve}")

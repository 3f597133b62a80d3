"""The session of a run that has a parent: as any other, apart from what grading again shows and how it begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from prefect import runtime
from rich.table import Table

from flows.artifacts import RunArtifacts
from flows.restarting import flow_run_id, started_before
from flows.session import Session, stopped_while_sealed
from flows.stopping import starting
from forge_core.config import ConfigError, RunConfig, load_config
from forge_core.observability.rescored import COLUMNS, RescoreProgress, rescored_table, rescored_title
from forge_core.runs.record import RunRecord, create_run, load_run, resume_check, resume_run
from forge_core.runs.redo_setup import Redo, check_changes, check_redo, rescore_of, retrain_of
from forge_core.runs.rescored import rescored_entries
from forge_core.store import Store, open_store

checks_log = logging.getLogger("forge.checks")


def new_redo_session(
    kind: str, parent: str, store_root: str, overrides: list[str], allow_code: bool, **how: Any
) -> RedoSession:
    """A session of a new run made from ``parent``. Raises ConfigError before anything is stored or loaded."""
    store = open_store(store_root)
    make: Callable[..., Redo] = {"rescore": rescore_of, "retrain-from": retrain_of}[kind]  # type: ignore[assignment]
    named = [word.removeprefix("run.id=") for word in overrides if word.startswith("run.id=")]
    if named and started_before(store, named[-1]):
        return resumed_redo_session(named[-1], store.uri, [], [], False)
    redo = make(store, parent, overrides, allow_code=allow_code, **how)
    for warning in redo.warnings:
        checks_log.warning(warning)
    with starting(store, str(redo.config.run.id)):
        return session_of(store, create_run(store, redo.config, redo.parent, flow_run_id()))


def resumed_redo_session(
    run_id: str, store_root: str, overrides: list[str], allow_keys: list[str], allow_code: bool
) -> RedoSession:
    """A session that goes on with a stored run. Raises ConfigError naming every difference not allowed."""
    store = open_store(store_root)
    with starting(store, run_id):
        record = load_run(store, run_id)
        config, changed = check_resumable(store, record, overrides, allow_keys, allow_code)
        trains = record.flow == "retrain-from"
        if changed and trains and (stopped := stopped_while_sealed(store, record, session_of)):
            return stopped  # type: ignore[no-any-return]
        return session_of(store, resume_run(store, record, config, allow_keys, allow_code))


def check_resumable(
    store: Store, record: RunRecord, overrides: list[str], allow_keys: list[str], allow_code: bool
) -> tuple[RunConfig, list[str]]:
    """The configuration to go on with, and what it changes."""
    assert record.parent is not None
    config = load_config(record.config, overrides)
    check_changes(record.config, config, record.flow)
    changed, _ = resume_check(store, record, config, allow_keys, allow_code)
    graders = [name for name in changed if name.startswith("reward")]
    if record.flow == "rescore" and graders:
        raise ConfigError(
            f"{', '.join(graders)}: one run is graded in one way: start another with "
            f"`forge rescore {record.parent.run_id} --reward ...`"
        )
    for warning in check_redo(config, record.parent):
        checks_log.warning(warning)
    return config, changed


def session_of(store: Store, record: RunRecord) -> RedoSession:
    return (RescoreSession if record.flow == "rescore" else RedoSession)(store, record)


class RedoSession(Session):
    def __init__(self, store: Store, record: RunRecord) -> None:
        super().__init__(store, record)
        self.kind = record.flow


class RescoreSession(RedoSession):
    """Batches that are graded take the place of training steps."""

    done = "batches graded again"
    figures = None

    def __init__(self, store: Store, record: RunRecord) -> None:
        super().__init__(store, record)
        self.window.last = "rescore"
        flow_run, steps = runtime.flow_run.id, self.config.steps
        self._artifacts = RunArtifacts(self._best_effort, flow_run, record.run_id, steps, COLUMNS, None)
        self._progress = RescoreProgress(record.run_id, steps, console=self._console)

    def first_batch(self) -> int:
        self.stop.check()
        entries = self._entries()
        self._progress.start(entries)
        return len(entries)

    def _entries(self) -> list[dict[str, Any]]:
        return rescored_entries(self._context.store, self.run.run_id)

    def _table(self, entries: list[dict[str, Any]]) -> Table:
        return rescored_table(entries, rescored_title(entries), self.run.run_id)

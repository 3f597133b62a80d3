"""A session: one process working on one run, from the checks at its start to its outcome.

Invariants:
- Everything that can be wrong with the input is found before an engine is loaded.
- A stop (Ctrl-C, SIGTERM, ``forge stop``, Cancel in the UI) or a failure ends all engine calls within seconds; what was
  not committed is left as it is, and the run can be resumed.
- Progress and artifacts are best effort: they neither fail nor slow a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefect import runtime
from prefect.states import Completed, State
from prefect.utilities.urls import url_for
from rich.console import Console
from rich.table import Table

from flows.alarming import Alarming
from flows.artifacts import DRAWING_S, LAST_S, SENDING_S, RunArtifacts
from flows.output import outlive_readers
from flows.restarting import flow_run_id, is_deployed, started_before, stopped_state, with_run_id
from flows.stoppable import stoppable
from flows.stopping import StopWatcher, starting
from flows.window import Window
from forge_core.config import ConfigError, RunConfig, load_config, store_uri
from forge_core.config.overrides import Overrides
from forge_core.logs import ProcessLog
from forge_core.observability.best_effort import BestEffort
from forge_core.observability.progress import ProgressDisplay, closing_table
from forge_core.report.figures import Drawing, curves_of, live
from forge_core.report.themes import png
from forge_core.runs import RunRef
from forge_core.runs.checks import check_run, with_stored_model
from forge_core.runs.context import RunContext, attach, detach
from forge_core.runs.failures import record_failure
from forge_core.runs.heartbeat import Heartbeat
from forge_core.runs.planning import shard_count
from forge_core.runs.record import RunRecord, create_run, load_run, refuse_generation, resume_check, resume_run
from forge_core.runs.sealing import seal
from forge_core.stop import Stopped, StopToken
from forge_core.store import Store, StoreError, open_store

log = logging.getLogger("forge")
checks_log = logging.getLogger("forge.checks")  # its own, since the command line has said the same before
SETTLE_S = 8.0  # open tasks get this long to notice a stop
WORKER = "run"  # the name of a run's one process among its workers
BEAT_S = 10.0  # seconds between its signs of life


@dataclass(frozen=True)
class Kind:
    """What the sessions of a flow's runs differ in. ``load`` and ``check`` its configuration, ``stored``: that of a
    record; ``with_stored_model``: as a resumed run needs it; ``opened``: the session."""

    flow: str
    load: Callable[[Any, Any], Any]
    check: Callable[[Any], Iterable[str]]
    stored: Callable[[RunRecord], Any]
    with_stored_model: Callable[[Store, str, Any], Any]
    opened: Callable[[Store, RunRecord], Any]


def name_of_run(kind: Kind) -> str:
    """Name of the flow run in the UI: the run's id."""
    config, overrides = (runtime.flow_run.parameters[name] for name in ("config", "overrides"))
    try:
        return str(with_run_id(kind.load(config, overrides or {}), kind.flow).run.id)
    except ConfigError:  # the flow says what is wrong
        return kind.flow


def session_of_new(kind: Kind, given: Any, overrides: dict[str, Any]) -> Any:
    """A session of a new run, or of the run that an earlier start of this flow run has made.

    Raises ConfigError before anything is stored or loaded.
    """
    config = with_run_id(kind.load(given, overrides), kind.flow)
    assert config.run.id is not None
    store = open_store(store_uri(None, config))
    if started_before(store, config.run.id):
        return session_of_stored(kind, config.run.id, store.uri, [], [], False)
    with starting(store, config.run.id):
        for warning in kind.check(config):
            checks_log.warning(warning)
        return kind.opened(store, create_run(store, config, flow_run=flow_run_id()))


def session_of_stored(
    kind: Kind, run_id: str, store_root: str, overrides: Overrides, allow_keys: list[str], allow_code: bool
) -> Any:
    """A session that goes on with a stored run. Raises ConfigError naming every difference not allowed."""
    store = open_store(store_root)
    with starting(store, run_id):
        record = load_run(store, run_id)
        config = kind.load(kind.stored(record), overrides)
        changed, _ = resume_check(store, record, config, allow_keys, allow_code)  # before its code is imported
        for warning in kind.check(kind.with_stored_model(store, run_id, config)):
            checks_log.warning(warning)
        if changed and (stopped := stopped_while_sealed(store, record, kind.opened)):
            return stopped
        return kind.opened(store, resume_run(store, record, config, allow_keys, allow_code))


def stopped_while_sealed(store: Store, record: RunRecord, opened: Callable[[Store, RunRecord], Any]) -> Any:
    """Seal a run whose configuration is to change. A stop ends that as it ends a run: returned is a session of the run
    as it was, which is stopped before it begins; else None."""
    with stoppable(store, record.run_id, flow_run_id()) as stop, suppress(Stopped):
        seal(store, record, stop)
    if stop.reason is None:
        return None
    session = opened(store, replace(record, code_checked=True))
    session.stop.set(stop.reason)
    return session


def run_name() -> str:
    """Name of a GRPO flow run."""
    return name_of_run(GRPO)


def new_session(config: RunConfig | str, overrides: dict[str, Any]) -> Session:
    """``session_of_new`` of a GRPO run."""
    session: Session = session_of_new(GRPO, config, overrides)
    return session


def resumed_session(
    run_id: str, store_root: str, overrides: Overrides, allow_keys: list[str], allow_code: bool
) -> Session:
    """``session_of_stored`` of a GRPO run."""
    session: Session = session_of_stored(GRPO, run_id, store_root, overrides, allow_keys, allow_code)
    return session


def _stored_grpo(record: RunRecord) -> RunConfig:
    refuse_generation(record)
    return record.config


class Session:
    """Context manager around a run's work; ``outcome`` is the flow's final state."""

    done = "training steps committed"  # what was done ``steps`` times
    figures: Callable[..., list[Drawing]] | None = staticmethod(curves_of)  # the first is a file in the end

    def __init__(self, store: Store, record: RunRecord) -> None:
        outlive_readers()
        self.run = RunRef(record.run_id, store.uri)
        self.config = record.config
        self.stop = StopToken()
        self.window = Window(self.stop)
        self.outcome: State[Any] | None = None
        self._context = self._opened(store, record)
        self._watcher = StopWatcher(self.stop, store, record.run_id, runtime.flow_run.id)
        self._heartbeat = Heartbeat(store, record.run_id, WORKER, WORKER, every_s=BEAT_S)
        self._best_effort = BestEffort(limit_s=30.0)
        self._log = ProcessLog(record.run_id, role=None)
        self._artifacts = RunArtifacts(
            self._best_effort, runtime.flow_run.id, record.run_id, self.config.steps,
            figures=partial(live, store, record.run_id),
        )  # fmt: skip
        self._console = wide_console()
        self._progress = ProgressDisplay(record.run_id, self.config.steps, console=self._console)
        self._alarms = Alarming(self._context, self.note)

    def _opened(self, store: Store, record: RunRecord) -> RunContext:
        return RunContext(store, record, self.stop)

    @property
    def shards(self) -> int:
        return shard_count(self.config)

    def first_batch(self) -> int:
        """The first training step that is not committed; from here on steps are timed. Raises Stopped."""
        self.stop.check()
        entries = self._entries()
        self._progress.start(entries)
        self._alarms.begin(entries)
        self._alarms.watch_silence()
        if self._context.samples:
            self._context.rollouts.begin(len(entries))
            self._context.load_trainer(len(entries))
            self._context.start_grading(len(entries))
        return len(entries)

    def _committed(self, entry: dict[str, Any]) -> None:
        self._heartbeat.made()
        self._heartbeat.doing(f"has finished batch {entry['batch']}")

    def note(self, text: str) -> None:
        """Tell a person."""
        self._progress.note(text)

    def _entries(self) -> list[dict[str, Any]]:
        return self._context.ledger.entries()

    def __enter__(self) -> Self:
        attach(self.run, self._context)
        self._context.observers += [self._artifacts.step, self._progress.update, self._committed]
        self._watcher.__enter__()
        self._heartbeat.__enter__()
        self._context.note = self.note
        self._progress.note(f"this run in the UI: {url_for('flow-run', obj_id=runtime.flow_run.id)}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self.stop.set(f"{type(error).__name__}: {error}")
            self._report_unfinished(self.window.settle(SETTLE_S))
            if not isinstance(error, Stopped | KeyboardInterrupt):
                record_failure(self._context.store, self.run.run_id, "run", error)
        self._progress.close()
        self._alarms.close()
        try:
            self._show_result(LAST_S if error is None else DRAWING_S)
        except StoreError as outage:  # the run's own outcome is what matters now
            log.warning("no closing table: %s", outage)
        finally:
            self._watcher.__exit__(None, None, None)
            if not self.window.settle(0.0):
                self._context.close()
            detach(self.run)
            self._heartbeat.__exit__(kind, error, trace)
            self._log.close()
        self.outcome = self._final_state(error)
        return isinstance(error, Stopped)

    def _final_state(self, error: BaseException | None) -> State[Any]:
        if error is not None:
            message = f"{error}; go on with: forge resume {self.run.run_id}"
            return stopped_state(error, message, restarted=is_deployed())
        return Completed(message=f"{self.config.steps} {self.done}")

    def _report_unfinished(self, names: list[str]) -> None:
        if names:
            log.warning("still working after %.0f s: %s", SETTLE_S, ", ".join(names))

    def _show_result(self, limit_s: float) -> None:
        """The closing table, the figures as artifacts, and the first of them as a file."""
        entries = self._entries()
        if entries:
            self._artifacts.finish(entries, limit_s)
            self._console.print(self._table(entries))
            if self.figures and not is_deployed():  # a deployment's working directory is the code's
                self._best_effort.submit(self._write_figure, self.figures(entries)[0])
        # Always: a thread that draws when the interpreter ends aborts the process, one that sends holds up its end.
        self._best_effort.close(limit_s + SENDING_S)

    def _table(self, entries: list[dict[str, Any]]) -> Table:
        return closing_table(entries, self.run.run_id)

    def _write_figure(self, drawing: Drawing) -> None:
        file = Path(f"{self.run.run_id}-{drawing.name}.png").absolute()
        if png(drawing.draw, file):
            self._progress.note(f"{drawing.name} curve: {file}")


GRPO = Kind("grpo", load_config, check_run, _stored_grpo, with_stored_model, Session)


class OpenConsole(Console):
    """A console whose reader may go away: a pipe that closes (``2>&1 | head``) must not end a run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def wide_console() -> Console:
    """Standard error; wide enough for the closing table where it is no terminal."""
    console = OpenConsole(stderr=True)
    return console if console.is_terminal else OpenConsole(stderr=True, width=140)

"""The coordinator's side of a run: it is created or found, watched and shown in the UI.

Invariant: an outage of the store or of the server is waited out.
"""

from __future__ import annotations

import logging
from functools import partial
from types import TracebackType
from typing import Any

from prefect import runtime
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from flows.alarming import Alarming
from flows.artifacts import DRAWING_S, LAST_S, SENDING_S, RunArtifacts
from flows.crew import CrewLost
from flows.flow_runs import PREEMPTED
from flows.output import outlive_readers
from flows.restarting import flow_run_id, started_before, with_run_id
from flows.stopping import SIGTERM, StopWatcher
from forge_core.config import ConfigError, RunConfig, load_config, store_uri, validate_for_training
from forge_core.devices import alone
from forge_core.observability.best_effort import BestEffort
from forge_core.report.figures import live
from forge_core.runs.context import RunContext
from forge_core.runs.frontier import Frontier
from forge_core.runs.record import RunRecord, create_run, load_run
from forge_core.stop import Stopped, StopToken
from forge_core.store import Store, StoreError, open_store

log = logging.getLogger("forge")
LOOK_S = 2.0


class Coordination:
    """Context manager around a coordinator's work; ``outcome`` is the flow's final state."""

    def __init__(self, config: RunConfig | str | None, overrides: dict[str, Any], resume: str | None) -> None:
        outlive_readers()
        self.store, record = _stored(resume, overrides) if resume else _created(config, overrides)
        self.stop = StopToken()
        self.run_id, self.steps = record.run_id, record.config.steps
        self.context = RunContext(self.store, record, self.stop, role="coordinator")
        self.frontier = Frontier(self.context)
        self.outcome: State[Any] | None = None
        self._watcher = StopWatcher(self.stop, self.store, self.run_id, runtime.flow_run.id)
        self._best_effort = BestEffort(limit_s=30.0)
        drawn = partial(live, self.store, self.run_id)
        self._artifacts = RunArtifacts(self._best_effort, runtime.flow_run.id, self.run_id, self.steps, figures=drawn)
        self._alarms = Alarming(self.context, log.warning)
        self._shown = 0

    def __enter__(self) -> Coordination:
        self._watcher.__enter__()
        self._alarms.watch_silence()
        return self

    def finished(self) -> bool:
        """Whether every step is committed; during an outage of the store: not that we know."""
        try:
            return self.frontier.finished()
        except (StoreError, OSError) as outage:
            log.warning("the store does not answer: %s", outage)
            return False

    def show_progress(self) -> None:
        """Show newly committed steps in the UI."""
        try:
            while (entry := self.context.ledger.entry(self._shown)) is not None:
                self._artifacts.step(entry)
                self._shown += 1
        except (StoreError, OSError) as outage:
            log.warning("no progress to show: %s", outage)

    def pause(self) -> None:
        self.stop.wait(LOOK_S)
        self.stop.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._watcher.__exit__(None, None, None)
        self._alarms.close()
        if error is None:
            self._show_result()
        self._best_effort.close((DRAWING_S if error else LAST_S) + SENDING_S)
        self.context.close()
        self.outcome = self._final_state(error)
        return self.outcome is not None

    def _show_result(self) -> None:
        try:
            self._artifacts.finish(self.context.ledger.entries(), LAST_S)
        except (StoreError, OSError) as outage:  # the run's own outcome is what matters now
            log.warning("no closing figures: %s", outage)

    def _final_state(self, error: BaseException | None) -> State[Any] | None:
        if error is None:
            return Completed(message=f"{self.steps} training steps committed")
        if isinstance(error, CrewLost):
            return Failed(message=str(error))
        if not isinstance(error, Stopped):
            return None
        if error.reason == SIGTERM:
            return Crashed(name=PREEMPTED, message=f"{error}; the roles go on")
        return Cancelled(message=f"{error}; go on with resume={self.run_id}")


def _stored(run_id: str, overrides: dict[str, Any]) -> tuple[Store, RunRecord]:
    """The stored run to go on with; of ``overrides`` only ``store`` may be given."""
    if other := sorted(overrides.keys() - {"store"}):
        raise ConfigError(
            f"overrides: {', '.join(other)}: run {run_id!r} goes on with the configuration it has; to change it first: "
            f"forge resume {run_id} {other[0]}=… --allow-config-change {other[0]}"
        )
    store = open_store(store_uri(overrides.get("store")))
    return store, load_run(store, run_id)


def _created(config: RunConfig | str | None, overrides: dict[str, Any]) -> tuple[Store, RunRecord]:
    """A new run, or the one that an earlier start of this flow run has made."""
    if config is None:
        raise ConfigError("config: is missing: choose a configuration, or name a stored run to go on with in resume")
    wanted = with_run_id(load_config(config, overrides), "grpo")
    assert wanted.run.id is not None
    store = open_store(store_uri(None, wanted))
    if started_before(store, wanted.run.id):
        return store, load_run(store, wanted.run.id)
    for warning in validate_for_training(alone(wanted, "coordinator")):
        log.warning(warning)
    return store, create_run(store, wanted, flow_run=flow_run_id())

"""A role session: one process that does one role's share of a run, from the checks at its start to its outcome.

Invariants:
- A role meets the others in the store alone: it waits for the objects that its work needs (polling with back-off), does
  the same tasks as the one-flow run, and publishes.
- It ends by itself within seconds of the run's last commit, within seconds of a stop, and after ``roles.wait_s``
  without anything new in the run: a role never waits for ever for a producer that has died.
- What it was doing when it is killed is done again by whoever takes over; what it has published stays.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeVar

from prefect import runtime
from prefect.states import Completed, Failed, State

from flows.alarming import Alarming
from flows.flow_runs import REFUSED, SUPERSEDED
from flows.output import outlive_readers
from flows.restarting import stopped_state
from flows.stopping import StopWatcher
from flows.window import raise_if_failed
from forge_core.algorithms.fates import StalenessError
from forge_core.config import ConfigError
from forge_core.data.errors import DataError
from forge_core.logs import ProcessLog
from forge_core.models.errors import ModelError
from forge_core.overdue import Overdue
from forge_core.runs import RunRef
from forge_core.runs.checks import check_role
from forge_core.runs.claims import Claims
from forge_core.runs.context import RunContext, attach, detach
from forge_core.runs.failures import record_failure
from forge_core.runs.frontier import Frontier
from forge_core.runs.heartbeat import Heartbeat, Unchanged
from forge_core.runs.initialise import initialise as import_version_zero
from forge_core.runs.planning import shards_at_once
from forge_core.runs.record import load_run
from forge_core.runs.sampler_check import SamplerMismatch
from forge_core.runs.trainer_session import DriftError
from forge_core.runs.training import LostRace
from forge_core.stop import Stopped, StopToken
from forge_core.store import CorruptObject, IdentityError, LedgerError, layout, open_store

log = logging.getLogger("forge")
FIRST_LOOK_S = 0.05  # between two looks at the store, at first; ``Store.longest_poll_s`` at most
START_WAIT_S = 3600.0  # for run.json: roles may be started before their run
BEATS = 5  # heartbeats in a claim's timeout
REFUSALS = (  # trying again would end the same way
    *(ConfigError, DataError, ModelError, StalenessError, DriftError, SamplerMismatch),
    *(IdentityError, CorruptObject, LedgerError),
)


class Claimable(Protocol):
    """Work that one of several processes does; ``claims``: the folder of its claims."""

    def claims(self, run_id: str) -> str: ...


T = TypeVar("T")
W = TypeVar("W", bound=Claimable)


class RoleSession:
    """Context manager around a role's work; ``outcome`` is the flow's final state. ``name`` is what the process is
    called in the store, unique in the run; left out, one is made."""

    def __init__(self, role: str, run_id: str, store: str, name: str | None = None) -> None:
        outlive_readers()
        self.role, self.name = role, name or f"{role}-{uuid.uuid4().hex[:8]}"
        self.outcome: State[Any] | None = None
        self.stop = StopToken()
        self._store = open_store(store)
        self.run = RunRef(run_id, self._store.uri)
        self._watcher = StopWatcher(self.stop, self._store, run_id, runtime.flow_run.id)
        self._running: list[tuple[Any, Any]] = []  # work, and the future of its task
        self._moved = Unchanged()
        self._context: RunContext | None = None
        self._heartbeat: Heartbeat | None = None
        self._alarms: Alarming | None = None  # of the role that commits
        self._log = ProcessLog(run_id, role)

    def __enter__(self) -> RoleSession:
        self._watcher.__enter__()
        return self

    def open(self) -> None:
        """Wait for the run, check that this process can work on it, and show the others that it does."""
        if not self._store.exists(layout.run_json(self.run.run_id)):
            self._say(f"waiting for run {self.run.run_id} to be created in {self._store.uri}")
        self._store.wait_for(layout.run_json(self.run.run_id), timeout_s=START_WAIT_S, stop=self.stop)
        record = load_run(self._store, self.run.run_id)
        for warning in check_role(self._store, record, self.role):
            log.warning(warning)
        self.config = record.config
        self._context = RunContext(self._store, record, self.stop, role=self.role)
        attach(self.run, self._context)
        if self.role == "trainer":
            self._alarms = Alarming(self._context, log.warning)
            self._alarms.begin()
        self.frontier = Frontier(self._context)
        timeout_s = self.config.roles.claim_timeout_s
        self.claims = Claims(self._store, self.run.run_id, self.name, timeout_s=timeout_s)
        beat_s = timeout_s / BEATS
        self._heartbeat = Heartbeat(self._store, self.run.run_id, self.role, self.name, every_s=beat_s)
        self._heartbeat.__enter__()

    def _say(self, what: str) -> None:
        """Tell whoever looks at this process: a role has no display of its own."""
        print(f"{self.role}: {what}", file=sys.stderr, flush=True)

    @property
    def context(self) -> RunContext:
        assert self._context is not None
        return self._context

    @property
    def heartbeat(self) -> Heartbeat:
        assert self._heartbeat is not None
        return self._heartbeat

    # What there is to do --------------------------------------------------------------------------------------------

    def await_policy(self) -> None:
        """Wait for version 0, and import what its model needs while no other thread runs."""
        self.heartbeat.doing("waiting for version 0")
        self.wait_until(lambda: self.context.ledger.head() >= 0)
        import_version_zero(self.context)

    def work(self, look: Callable[[], T | None]) -> Iterator[T]:
        """What ``look`` finds to do, until the run is finished. Waits while there is nothing."""
        while not self.frontier.finished():
            found = self.wait_until(lambda: look() or self.frontier.finished())
            if found is not True:
                self.heartbeat.doing(str(found))
                self._say(str(found))
                yield found
        self.finish(0)

    def wait_until(self, look: Callable[[], Any]) -> Any:
        """The first true value of ``look``. Raises Overdue when nothing in the run moves for ``roles.wait_s``."""
        pause = FIRST_LOOK_S
        while not (found := look()):
            self.stop.check()
            self._collect()
            head = self.context.ledger.head()
            self.context.prefetch(head)
            self._check_alive(head)
            self.stop.wait(pause)
            pause = min(pause * 1.5, self._store.longest_poll_s)
        self._moved.seconds("waiting", time.monotonic())  # there is work, so the run is alive
        return found

    def claimed(self, due: Callable[[Claims], Iterable[W]]) -> W | None:
        """The first work that is ``due`` which nobody else has claimed and this process is not doing already."""
        doing = [work for work, _ in self._running]
        for work in due(self.claims):
            if work not in doing and self.claims.take(work.claims(self.run.run_id)):
                return work
        return None

    @property
    def at_once(self) -> int:
        """Tasks that this generator runs at a time. One with pinned versions: its engine moves between two shards."""
        return 1 if self.config.rollout.version == "oldest" else shards_at_once(self.config)

    def start(self, work: Any, future: Any, at_once: int = 1) -> None:
        """Let a submitted task run; returns when fewer than ``at_once`` do. Raises a task's own error."""
        self._running.append((work, future))
        self.finish(at_once - 1)

    def finish(self, left: int) -> None:
        """Wait until at most ``left`` tasks run."""
        while len(self._running) > left:
            self.stop.check()
            self._running[0][1].wait(0.2 if len(self._running) == 1 else 0.05)
            self._collect()

    def _collect(self) -> None:
        """Let go of the tasks that have ended. Raises a task's own error."""
        for work, future in [(w, f) for w, f in self._running if f.state.is_final()]:
            self._running.remove((work, future))
            raise_if_failed(str(work), future)
            self.heartbeat.made()

    def _check_alive(self, head: int) -> None:
        limit = self.config.roles.wait_s
        waited = self._moved.seconds("waiting", head)
        if waited > limit:
            raise Overdue(
                f"{self.role} of run {self.run.run_id!r}: nothing to do and no training step after {head - 1} for "
                f"{waited:.0f} s (roles.wait_s={limit:g}): is the run's trainer at work? Start this role again with it"
            )

    def check_sole(self, batch: int) -> None:
        """Raise LostRace when it was another trainer that committed training step ``batch``."""
        entry = self.context.ledger.entry(batch)
        if entry is not None and entry["attempt"] != self.context.attempt:
            raise LostRace(
                f"training step {batch} of run {self.run.run_id!r} was committed by another trainer (attempt "
                f"{entry['attempt']}), which is at work: this one ({self.name}) stops: one trainer per run"
            )

    # How it ends ----------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self.stop.set(f"{type(error).__name__}: {error}")
            self._settle()
            if self._context is not None and not isinstance(error, Stopped | KeyboardInterrupt | LostRace):
                record_failure(self._store, self.run.run_id, self.role, error)
        self._watcher.__exit__(None, None, None)
        if self._alarms is not None:
            self._alarms.close()
        if self._context is not None:
            self._context.close()
            detach(self.run)
        if self._heartbeat is not None:
            self._heartbeat.__exit__(kind, error, trace)
        self._log.close()
        self.outcome = final_state(self.role, error)
        return self.outcome is not None

    def _settle(self, limit_s: float = 8.0) -> None:
        deadline = time.monotonic() + limit_s
        while any(not f.state.is_final() for _, f in self._running) and time.monotonic() < deadline:
            time.sleep(0.1)


def final_state(role: str, error: BaseException | None) -> State[Any] | None:
    """The state that tells a coordinator and a person how a role ended; None: the flow fails with the error itself."""
    if error is None:
        return Completed(message=f"{role}: the run is finished")
    if isinstance(error, Stopped):
        return stopped_state(error, str(error), restarted=True)
    if isinstance(error, LostRace):
        return Failed(name=SUPERSEDED, message=str(error))
    if isinstance(error, REFUSALS):
        return Failed(name=REFUSED, message=f"{type(error).__name__}: {error}")
    return None

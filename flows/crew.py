"""The roles of one run as flow runs of their deployments: started, watched, started again, ended.

Invariants:
- What is known of a role comes from the server (its state) and from the store (its heartbeat, and whether it makes
  objects while it has work). Ages are measured on this process's clock.
- A role is started again when its flow run ended before the run did, when its heartbeat stopped, or when it has work
  and makes nothing for ``roles.stuck_s``; at most ``roles.max_restarts`` times without an object of its own in between.
- A role that was started twice harms nobody: claims, manifests and the ledger let one of two win.
- A server that does not answer is asked again at the next look.
- The roles end with the run, with a stop or Cancel in the UI, and when one of them cannot be kept alive: they are told
  through the store, and within ``DISMISS_S`` their flow runs are cancelled, with the reason. When the coordinator alone
  goes (it is killed, preempted, or fails) they stay at work for the next one.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Crashed, State

from flows.flow_runs import REFUSED, SUPERSEDED, begin, ended, unfinished
from flows.role_session import BEATS
from flows.stopping import CANCELLED, SIGTERM, STOP, request_stop
from forge_core.runs.context import RunContext
from forge_core.runs.frontier import Frontier
from forge_core.runs.heartbeat import Unchanged, read_heartbeat
from forge_core.stop import Stopped
from forge_core.store import StoreError

log = logging.getLogger("forge")
SILENT_BEATS = 3  # heartbeats that a role may miss beyond a claim's timeout
UNTAKEN_S = 60.0  # after which a role that no worker has taken is mentioned
DISMISS_S = 30.0  # that roles have to end by themselves
ROLES = ("trainer", "generator", "scorer", "reference")


class CrewLost(RuntimeError):
    """A role that the run needs cannot be kept alive."""


@dataclass
class Member:
    """One role process: where it is on the server, and how often it was started without result."""

    role: str
    index: int
    name: str = ""
    flow_run: FlowRun | None = None
    restarts: int = 0
    made: int = 0  # objects, as its heartbeat says
    not_before: float = 0.0
    mentioned: bool = False  # that no worker has taken it


class Crew:
    """Context manager around the looking after."""

    def __init__(self, context: RunContext, frontier: Frontier) -> None:
        self._ctx, self._frontier = context, frontier
        self._roles = context.config.roles
        self._unchanged = Unchanged()
        self._busy: set[str] = set()  # roles that have something to do
        counts = {"generator": self._roles.generators, "scorer": self._roles.scorers}
        wanted = ROLES if context.config.grpo.beta > 0 else ROLES[:-1]
        self._members = [Member(role, i) for role in wanted for i in range(counts.get(role, 1))]
        self._adopted = False

    def look_after(self) -> None:
        """Start what is not there, start again what is gone. Raises CrewLost."""
        try:
            with get_client(sync_client=True) as client:
                self._adopt(client)
                self._busy = self._frontier.waiting_for()
                for member in self._members:
                    self._look(client, member)
        except (httpx.HTTPError, StoreError, OSError) as outage:
            log.warning("the roles cannot be looked after now: %s", outage)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._dismiss("the run is finished")
        elif isinstance(error, CrewLost) or (isinstance(error, Stopped) and error.reason != SIGTERM):
            if not (isinstance(error, Stopped) and error.reason == STOP):  # of that they hear themselves
                request_stop(self._ctx.store, self._ctx.run_id, f"coordinator: {error}")
            self._dismiss(str(error))

    def _dismiss(self, reason: str) -> None:
        """Give the roles time to end by themselves, then cancel those that did not."""
        deadline = time.monotonic() + DISMISS_S
        while (left := self._left()) and time.monotonic() < deadline:
            for flow_run in left:
                if flow_run.state is not None and not flow_run.state.is_running():  # nobody is there to end it
                    _cancel(flow_run, reason)
            time.sleep(1.0)
        for flow_run in left:
            _cancel(flow_run, reason)

    def _left(self) -> list[FlowRun]:
        """The flow runs that have not ended."""
        with _outages_are_logged(), get_client(sync_client=True) as client:
            for member in self._members:
                self._refresh(client, member)
        runs = (member.flow_run for member in self._members)
        return [run for run in runs if run is not None and not ended(run)]

    def _adopt(self, client: SyncPrefectClient) -> None:
        """Take over the roles of this run that an earlier coordinator started."""
        if self._adopted:
            return
        alive = unfinished(client, _run_tag(self._ctx.run_id))
        for member in self._members:
            member.flow_run = next((r for r in alive if _role_tag(member.role) in r.tags), None)
            if member.flow_run is not None:
                alive.remove(member.flow_run)
                member.name = member.flow_run.parameters["name"]
        self._adopted = True

    def _look(self, client: SyncPrefectClient, member: Member) -> None:
        if member.flow_run is None:
            return self._start(client, member)
        self._refresh(client, member)
        beat = read_heartbeat(self._ctx.store, self._ctx.run_id, member.name)
        if beat is not None and beat["made"] > member.made:
            member.made, member.restarts = beat["made"], 0
        if not ended(member.flow_run):
            if (given_up := self._given_up(member, beat)) is not None:
                self._replace(client, member, given_up.message or "", given_up)
        elif (why := self._ended_why(member)) is not None:
            self._replace(client, member, why)

    def _refresh(self, client: SyncPrefectClient, member: Member) -> None:
        if member.flow_run is not None:
            try:
                member.flow_run = client.read_flow_run(member.flow_run.id)
            except ObjectNotFound:  # somebody deleted it
                member.flow_run = None

    def _ended_why(self, member: Member) -> str | None:
        """Why a role whose flow run has ended is started again; None: it is not, or not yet. Raises CrewLost."""
        assert member.flow_run is not None
        assert member.flow_run.state is not None
        state = member.flow_run.state
        message = f"{state.name}: {state.message or 'no message'}"
        if state.name == REFUSED:
            raise CrewLost(f"the {member.role} cannot work on this run: {state.message}")
        if state.name == SUPERSEDED:  # another one is at work; ours is needed again when nothing moves any more
            silent = self._unchanged.seconds(member.name, self._ctx.ledger.head())
            return message if silent > self._roles.stuck_s else None
        if state.is_cancelled() and CANCELLED in (state.message or ""):
            if self._others(member):
                return None
            raise CrewLost(f"the run's only {member.role} was cancelled in Prefect")
        return None if state.is_completed() else message

    def _others(self, member: Member) -> bool:
        return any(
            other is not member and other.role == member.role and other.flow_run and not ended(other.flow_run)
            for other in self._members
        )

    def _given_up(self, member: Member, beat: dict[str, Any] | None) -> State[Any] | None:
        """The state for a role that has not ended, as far as the server knows, and is replaced; None: it is well."""
        assert member.flow_run is not None
        assert member.flow_run.state is not None
        if beat is None:
            if not member.flow_run.state.is_running():
                self._mention_untaken(member)
            return None
        silence = self._roles.claim_timeout_s * (1 + SILENT_BEATS / BEATS)
        if self._unchanged.seconds((member.name, "beat"), beat["beat"]) > silence:
            return Crashed(message=f"no heartbeat for {silence:.0f} s")
        works = member.role in self._busy
        if self._unchanged.seconds((member.name, "made"), (beat["made"], works)) > self._roles.stuck_s and works:
            why = f"it has work and made nothing for {self._roles.stuck_s:.0f} s ({beat['doing']})"
            return Cancelling(message=why)
        return None

    def _mention_untaken(self, member: Member) -> None:
        if self._unchanged.seconds((member.name, "untaken"), True) > UNTAKEN_S and not member.mentioned:
            member.mentioned = True
            log.warning(
                f"no worker has taken the {member.role} of run {self._ctx.run_id} for {UNTAKEN_S:.0f} s: start one "
                f"with `prefect worker start --pool {member.role}`"
            )

    def _replace(self, client: SyncPrefectClient, member: Member, why: str, given_up: State[Any] | None = None) -> None:
        """Start the role again; ``given_up``: the state for its flow run, where that has not ended."""
        assert member.flow_run is not None
        if member.restarts >= self._roles.max_restarts:
            raise CrewLost(
                f"the {member.role} was started again {member.restarts} times without making anything "
                f"(roles.max_restarts); the last one: {why}"
            )
        if given_up is not None:
            client.set_flow_run_state(member.flow_run.id, given_up, force=True)
        log.warning("%s %s: %s; it is started again", member.role, member.name, why)
        member.not_before = time.monotonic() + 2.0**member.restarts - 1.0
        member.restarts, member.flow_run, member.made = member.restarts + 1, None, 0
        self._start(client, member)

    def _start(self, client: SyncPrefectClient, member: Member) -> None:
        if time.monotonic() < member.not_before:
            return
        name = f"{member.role}-{member.index}-{uuid.uuid4().hex[:6]}"
        parameters = {"run_id": self._ctx.run_id, "store": self._ctx.store.uri, "name": name}
        tags = (_run_tag(self._ctx.run_id), _role_tag(member.role))
        member.flow_run = begin(client, f"{member.role}/role", parameters, *tags)
        member.name = name


def _run_tag(run_id: str) -> str:
    return f"run:{run_id}"


def _role_tag(role: str) -> str:
    return f"role:{role}"


def _cancel(run: FlowRun, reason: str) -> None:
    with _outages_are_logged(), get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Cancelling(message=reason))


@contextmanager
def _outages_are_logged() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, OSError) as outage:
        log.warning("the Prefect server does not answer: %s", outage)

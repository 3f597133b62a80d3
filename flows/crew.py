"""The roles of one run as flow runs of their deployments: started, watched, started again, ended.

Invariants:
- What is known of a role comes from the server (its state) and from the store (its heartbeat, and whether it makes
  objects while it has work). Ages are measured on this process's clock.
- A role is started again when its flow run was deleted or ended before the run did, when its heartbeat stopped, or when
  it has work and makes nothing for ``roles.stuck_s``; at most ``roles.max_restarts`` times without an object of its own
  in between. What one whose flow run ended had claimed is free at once.
- A role that was started twice harms nobody: claims, manifests and the ledger let one of two win.
- A server that does not answer is asked again at the next look.
- The roles end with the run, with a stop or Cancel in the UI, and when one of them cannot be kept alive: they are told
  through the store, and within ``DISMISS_S`` their flow runs are cancelled, with the reason. Only the trainer of a
  finished run, which uploads its last checkpoint after the last commit, has as long as it shows signs of life,
  ``roles.stuck_s`` at most. When the coordinator alone goes (it is killed, preempted, or fails) they stay at work for
  the next one.
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
from prefect.states import Cancelling, Crashed, State

from flows.flow_runs import REFUSED, SUPERSEDED, begin, ended, refreshed, set_state, unfinished
from flows.role_session import BEATS
from flows.stopping import CANCELLED, SIGTERM, STOP, request_stop
from forge_core.runs.context import RunContext
from forge_core.runs.frontier import Frontier
from forge_core.runs.heartbeat import Unchanged, declare_ended, read_heartbeat
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
            self._dismiss("the run is finished", last_work=True)
        elif isinstance(error, CrewLost) or (isinstance(error, Stopped) and error.reason != SIGTERM):
            if not (isinstance(error, Stopped) and error.reason == STOP):  # of that they hear themselves
                with _outages_are_logged():
                    request_stop(self._ctx.store, self._ctx.run_id, f"coordinator: {error}")
            self._dismiss(str(error))

    def _dismiss(self, reason: str, *, last_work: bool = False) -> None:
        """Give the roles time to end by themselves, then cancel those that did not. ``last_work``: there may be some
        after the last commit; a coordinator whose machine is taken meanwhile leaves it to them."""
        began = time.monotonic()
        while (left := self._left()) and not (last_work and self._ctx.stop.reason == SIGTERM):
            waited = time.monotonic() - began
            waits = [member for member in left if waited < self._patience_s(member, last_work)]
            for member in left:
                if member not in waits or not _is_running(member):  # nobody is there to end the latter
                    _cancel(member, reason)
            if not waits:
                return
            time.sleep(1.0)

    def _patience_s(self, member: Member, last_work: bool) -> float:
        """Seconds that the role may take to end. The last checkpoint of a large model takes minutes."""
        works = last_work and member.role == "trainer" and not self._ctx.stop.is_set() and self._lives(member)
        return max(DISMISS_S, self._roles.stuck_s) if works else DISMISS_S

    def _lives(self, member: Member) -> bool:
        """Whether the role shows signs of life; during an outage of the store: it does."""
        with _outages_are_logged():
            beat = read_heartbeat(self._ctx.store, self._ctx.run_id, member.name)
            return beat is not None and not self._is_silent(member, beat)
        return True

    def _left(self) -> list[Member]:
        """The members whose flow runs have not ended."""
        with _outages_are_logged(), get_client(sync_client=True) as client:
            for member in self._members:
                self._refresh(client, member)
        return [each for each in self._members if each.flow_run is not None and not ended(each.flow_run)]

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
        if member.flow_run is None:
            self._replace(client, member, "its flow run was deleted")
        elif not ended(member.flow_run):
            if (given_up := self._given_up(member, beat)) is not None:
                self._replace(client, member, given_up.message or "", given_up)
        elif (why := self._ended_why(member)) is not None:
            declare_ended(self._ctx.store, self._ctx.run_id, member.name)
            self._replace(client, member, why)

    def _refresh(self, client: SyncPrefectClient, member: Member) -> None:
        if member.flow_run is not None:
            member.flow_run = refreshed(client, member.flow_run)

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
        if self._is_silent(member, beat):
            return Crashed(message=f"no heartbeat for {self._silence_s:.0f} s")
        works = member.role in self._busy
        if self._unchanged.seconds((member.name, "made"), (beat["made"], works)) > self._roles.stuck_s and works:
            why = f"it has work and made nothing for {self._roles.stuck_s:.0f} s ({beat['doing']})"
            return Cancelling(message=why)
        return None

    @property
    def _silence_s(self) -> float:
        return self._roles.claim_timeout_s * (1 + SILENT_BEATS / BEATS)

    def _is_silent(self, member: Member, beat: dict[str, Any]) -> bool:
        return self._unchanged.seconds((member.name, "beat"), beat["beat"]) > self._silence_s

    def _mention_untaken(self, member: Member) -> None:
        if self._unchanged.seconds((member.name, "untaken"), True) > UNTAKEN_S and not member.mentioned:
            member.mentioned = True
            log.warning(
                f"no worker has taken the {member.role} of run {self._ctx.run_id} for {UNTAKEN_S:.0f} s: start one "
                f"with `prefect worker start --pool {member.role}`"
            )

    def _replace(self, client: SyncPrefectClient, member: Member, why: str, given_up: State[Any] | None = None) -> None:
        """Start the role again; ``given_up``: the state for its flow run, where that has not ended."""
        if member.restarts >= self._roles.max_restarts:
            raise CrewLost(
                f"the {member.role} was started again {member.restarts} times without making anything "
                f"(roles.max_restarts); the last one: {why}"
            )
        if given_up is not None and member.flow_run is not None:
            set_state(client, member.flow_run, given_up, force=True)
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


def _is_running(member: Member) -> bool:
    run = member.flow_run
    return run is None or run.state is None or run.state.is_running()


def _cancel(member: Member, reason: str) -> None:
    run = member.flow_run
    if run is None or (run.state is not None and run.state.is_cancelling()):
        return
    with _outages_are_logged(), get_client(sync_client=True) as client:
        set_state(client, run, Cancelling(message=reason))


@contextmanager
def _outages_are_logged() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, StoreError, OSError) as outage:
        log.warning("no answer, the roles may have to end by themselves: %s", outage)

"""What the coordinator does about flow runs that were deleted, are many, or have their last work still to do."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed, Crashed, Running, Scheduled, State

from flows import crew as crew_module
from flows.crew import DISMISS_S, Crew, CrewLost
from flows.flow_runs import PAGE, refreshed, set_state, unfinished
from flows.stopping import SIGTERM
from forge_core.runs.claims import Claims
from forge_core.stop import Stopped, StopToken
from forge_core.store import StoreError, layout, open_store

RUN = "run"
STUCK_S = 600.0


class Server:
    """The part of a Prefect server that a crew talks to; ``runs`` are its flow runs."""

    def __init__(self) -> None:
        self.runs: dict[uuid.UUID, FlowRun] = {}
        self.pages = 0  # of flow runs that were asked for
        self.at_read: Callable[[FlowRun], None] = lambda run: None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None: ...

    def add(self, role: str, state: State[Any], name: str = "") -> FlowRun:
        tags, parameters = [f"run:{RUN}", f"role:{role}"], {"name": name or role}
        run = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), state=state, tags=tags, parameters=parameters)
        self.runs[run.id] = run
        return run

    def of(self, role: str) -> list[FlowRun]:
        return [run for run in self.runs.values() if f"role:{role}" in run.tags]

    def read_flow_run(self, id: uuid.UUID) -> FlowRun:
        self.at_read(run := self._found(id))
        return run

    def read_flow_runs(self, *, flow_run_filter: Any, sort: Any, limit: int, offset: int) -> list[FlowRun]:
        """As the server: no more than its limit, of those that the filter lets through."""
        self.pages += 1
        assert limit <= 200
        left_out = set(flow_run_filter.state.type.not_any_) if flow_run_filter.state else set()
        tags = set(flow_run_filter.tags.all_)
        fit = [r for r in self.runs.values() if tags <= set(r.tags) and r.state and r.state.type not in left_out]
        return fit[offset : offset + limit]

    def set_flow_run_state(self, id: uuid.UUID, state: State[Any], force: bool = False) -> None:
        self._found(id).state = state

    def read_deployment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(id=name)

    def create_flow_run_from_deployment(self, id: str, *, parameters: dict[str, Any], tags: Any) -> FlowRun:
        return self.add(id.partition("/")[0], Running(), parameters["name"])

    def _found(self, id: uuid.UUID) -> FlowRun:
        if id not in self.runs:
            raise ObjectNotFound(http_exc=Exception("404"))
        return self.runs[id]


class Clock:
    """Time passes where the crew sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setattr(crew_module, "get_client", lambda sync_client: found)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(crew_module, "time", found)
    return found


def crew_of(store: Any = None, **roles: Any) -> Crew:
    values = {"generators": 1, "scorers": 1, "claim_timeout_s": 60.0, "stuck_s": STUCK_S, "max_restarts": 3, **roles}
    context: Any = SimpleNamespace(
        store=store or open_store(f"memory://{uuid.uuid4().hex}"),
        run_id=RUN,
        stop=StopToken(),
        config=SimpleNamespace(roles=SimpleNamespace(**values), grpo=SimpleNamespace(beta=0.0)),
    )
    frontier: Any = SimpleNamespace(waiting_for=set)
    return Crew(context, frontier)


def test_a_role_whose_flow_run_was_deleted_is_started_again(server: Server) -> None:
    crew = crew_of()
    crew.look_after()
    (before,) = server.of("scorer")
    del server.runs[before.id]
    crew.look_after()
    (after,) = server.of("scorer")
    assert after.parameters["name"] != before.parameters["name"]
    assert len(server.runs) == 3


def test_a_role_that_is_deleted_again_and_again_ends_the_run(server: Server) -> None:
    crew = crew_of(max_restarts=0)
    crew.look_after()
    server.runs.clear()
    with pytest.raises(CrewLost, match="its flow run was deleted"):
        crew.look_after()


def test_ending_a_role_whose_flow_run_was_just_deleted_fails_nothing(server: Server, clock: Clock) -> None:
    crew = crew_of()
    crew.look_after()
    for run in server.of("generator"):
        run.state = Scheduled()  # it would be cancelled at once
    ends = lambda run: server.runs.clear() if run in server.of("generator") else None
    server.at_read = ends
    crew.__exit__(None, None, None)
    assert clock.now < DISMISS_S
    run = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4())
    client: Any = server
    set_state(client, run, Crashed(), force=True)
    assert refreshed(client, run) is None


def test_what_a_role_that_crashed_had_claimed_is_free_for_the_one_after_it(server: Server) -> None:
    crew = crew_of()
    crew.look_after()
    (scorer,) = server.of("scorer")
    store, name, folder = crew._ctx.store, scorer.parameters["name"], layout.rewards_claims(RUN, 0, 0, 0)
    store.put_json(layout.worker(RUN, name), {"beat": 1, "made": 0, "ended": False})
    assert Claims(store, RUN, name, timeout_s=60.0).take(folder)
    assert not Claims(store, RUN, "another", timeout_s=60.0).take(folder)
    scorer.state = Crashed(message="out of memory")
    crew.look_after()
    assert Claims(store, RUN, "another", timeout_s=60.0).take(folder)


def test_a_coordinator_finds_its_roles_behind_any_number_of_ended_ones(server: Server) -> None:
    for _ in range(PAGE + 50):
        server.add("generator", Crashed())
    alive = {role: server.add(role, Running(), f"{role}-alive") for role in ("trainer", "generator", "scorer")}
    crew = crew_of()
    crew.look_after()
    assert {m.role: m.name for m in crew._members} == {role: f"{role}-alive" for role in alive}
    assert len(server.runs) == PAGE + 53, "no second crew"
    assert server.pages == 1, "those that have ended are not asked for"


def test_more_unfinished_flow_runs_than_a_page_are_all_found(server: Server) -> None:
    for _ in range(2 * PAGE + 1):
        server.add("generator", Running())
    client: Any = server
    assert {run.id for run in unfinished(client, f"run:{RUN}")} == set(server.runs)


def begun(server: Server) -> tuple[Crew, FlowRun]:
    """A crew at work, and the flow run of its trainer; the other roles end by themselves."""
    crew = crew_of()
    crew.look_after()
    for role in ("generator", "scorer"):
        server.of(role)[0].state = Completed()
    return crew, server.of("trainer")[0]


def beats(crew: Crew, trainer: FlowRun, clock: Clock, until_s: float) -> Callable[[FlowRun], None]:
    """Signs of life of a trainer that uploads for ``until_s`` seconds."""
    crew._unchanged._clock = clock.monotonic
    key, store = layout.worker(RUN, trainer.parameters["name"]), crew._ctx.store

    def at_read(run: FlowRun) -> None:
        if run is trainer and clock.now < until_s:
            store.put_json(key, {"beat": clock.now, "made": 1, "ended": False})

    return at_read


def test_the_trainer_may_upload_its_last_checkpoint(server: Server, clock: Clock) -> None:
    crew, trainer = begun(server)
    life = beats(crew, trainer, clock, STUCK_S)

    def uploads(run: FlowRun) -> None:
        life(run)
        if clock.now >= 10 * DISMISS_S:
            trainer.state = Completed()

    server.at_read = uploads
    crew.__exit__(None, None, None)
    assert trainer.state is not None
    assert trainer.state.is_completed(), trainer.state
    assert clock.now == 10 * DISMISS_S


def test_a_trainer_that_never_ends_is_cancelled_after_a_while(server: Server, clock: Clock) -> None:
    crew, trainer = begun(server)
    server.at_read = beats(crew, trainer, clock, 10 * STUCK_S)
    crew.__exit__(None, None, None)
    assert clock.now == STUCK_S
    assert trainer.state is not None
    assert trainer.state.is_cancelling()


def test_a_trainer_that_gives_no_sign_of_life_is_cancelled(server: Server, clock: Clock) -> None:
    crew, trainer = begun(server)
    server.at_read = beats(crew, trainer, clock, 100.0)
    crew.__exit__(None, None, None)
    assert 100.0 + 60.0 < clock.now < STUCK_S
    assert trainer.state is not None
    assert trainer.state.is_cancelling()


def test_the_other_roles_get_no_more_time_and_are_cancelled_once(
    server: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew, trainer = begun(server)
    server.at_read = beats(crew, trainer, clock, 10 * STUCK_S)
    scorer = server.of("scorer")[0]
    scorer.state = Running()
    cancelled: list[tuple[uuid.UUID, float]] = []
    give = server.set_flow_run_state

    def told(id: uuid.UUID, state: State[Any], force: bool = False) -> None:
        cancelled.append((id, clock.now))
        give(id, state, force)

    monkeypatch.setattr(server, "set_flow_run_state", told)
    crew.__exit__(None, None, None)
    assert cancelled == [(scorer.id, DISMISS_S), (trainer.id, STUCK_S)]


def test_a_coordinator_whose_machine_is_taken_leaves_the_last_upload_alone(server: Server, clock: Clock) -> None:
    crew, trainer = begun(server)
    server.at_read = beats(crew, trainer, clock, 10 * STUCK_S)
    crew._ctx.stop.set(SIGTERM)
    crew.__exit__(None, None, None)
    assert clock.now == 0.0
    assert trainer.state is not None
    assert trainer.state.is_running()


def test_a_stop_waits_for_no_trainer(server: Server, clock: Clock) -> None:
    crew, trainer = begun(server)
    server.at_read = beats(crew, trainer, clock, 10 * STUCK_S)
    stopped = Stopped("cancelled in Prefect")
    crew.__exit__(Stopped, stopped, None)
    assert clock.now == DISMISS_S
    assert trainer.state is not None
    assert trainer.state.is_cancelling()


@pytest.mark.parametrize("outage", [StoreError("503"), OSError("no route"), httpx.ConnectError("refused")])
def test_roles_are_ended_also_when_the_store_is_out(
    server: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch, outage: Exception
) -> None:
    def down(*_: object) -> None:
        raise outage

    crew, trainer = begun(server)
    monkeypatch.setattr(crew_module, "request_stop", down)
    crew.__exit__(CrewLost, CrewLost("the scorer"), None)
    assert trainer.state is not None
    assert trainer.state.is_cancelling()

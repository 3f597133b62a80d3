"""An evaluation that another machine makes: what becomes of it when that machine is taken, or its flow run deleted."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed, Failed, Running, Scheduled, State

from flows import elsewhere, evaluate
from flows.deploying_automations import PAUSE
from flows.elsewhere import EvaluationLost, evaluated_elsewhere
from flows.flow_runs import PREEMPTED
from flows.restarting import CRASHES
from flows.stopping import SIGTERM, STOP
from forge_core.config import ConfigError
from forge_core.runs import heartbeat
from forge_core.stop import Stopped
from forge_core.store import Store, open_store

PREFIX = "evaluations/0123456789ab/"


class Server:
    """A Prefect server, and time. ``says``: the state of the newest flow run after so many seconds; None: deleted."""

    def __init__(self, says: Callable[[float], State[Any] | None]) -> None:
        self.says, self.now, self.begun = says, 0.0, list[FlowRun]()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None: ...

    def begin(self, *_: Any) -> FlowRun:
        self.begun.append(FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), state=Scheduled()))
        return self.begun[-1]

    def read_flow_run(self, id: uuid.UUID) -> FlowRun:
        run, state = self.begun[-1], self.says(self.now)
        assert run.id == id
        if state is None:
            raise ObjectNotFound(http_exc=Exception("404"))
        return run.model_copy(update={"state": state})


def waiting(monkeypatch: pytest.MonkeyPatch, server: Server, made_after_s: float) -> Callable[[], str]:
    """A look-out for an evaluation that is in the store after a time."""
    store = open_store(f"memory://{uuid.uuid4().hex}")

    def wait(seconds: float) -> None:
        server.now += seconds
        if server.now >= made_after_s:
            store.publish(PREFIX, {"x": b"y"}, request="evaluation")

    stop: Any = SimpleNamespace(wait=wait, check=lambda: None)
    policy: Any = SimpleNamespace(name="run://r/3", version="r/3")
    monkeypatch.setattr(elsewhere, "get_client", lambda sync_client: server)
    monkeypatch.setattr(elsewhere, "evaluation_prefix", lambda *_: PREFIX)
    monkeypatch.setattr(elsewhere, "_begun", server.begin)
    monkeypatch.setattr(elsewhere, "Unchanged", lambda: heartbeat.Unchanged(lambda: server.now))
    return lambda: evaluated_elsewhere(store, None, policy, stop)  # type: ignore[arg-type]


def test_one_whose_machine_was_taken_is_waited_for_until_it_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    restart = PAUSE.total_seconds() + 60.0  # as late as a busy server does it
    server = Server(lambda now: Running() if now < 10.0 or now > restart else Crashed(name=PREEMPTED))
    assert waiting(monkeypatch, server, restart + 30.0)() == PREFIX
    assert len(server.begun) == 1


def test_one_that_crashed_and_is_not_started_again_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(lambda now: Crashed(message="out of memory"))
    with pytest.raises(EvaluationLost, match="out of memory"):
        waiting(monkeypatch, server, 10_000.0)()
    assert server.now >= elsewhere.RESTART.total_seconds()


@pytest.mark.parametrize("state", [Failed(message="no such file"), Cancelled(message="by hand")])
def test_one_that_failed_or_was_cancelled_is_lost_at_once(monkeypatch: pytest.MonkeyPatch, state: State[Any]) -> None:
    server = Server(lambda now: state)
    with pytest.raises(EvaluationLost, match=state.message):
        waiting(monkeypatch, server, 10_000.0)()
    assert server.now < 10.0


def test_in_place_of_one_that_was_deleted_another_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(lambda now: None)
    server.says = lambda now: None if now > 6.0 and len(server.begun) == 1 else Running()
    assert waiting(monkeypatch, server, 30.0)() == PREFIX
    assert len(server.begun) == 2


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bool], State[Any]]:
    """``stopped(reason, deployed)``: the final state of an evaluation that was stopped."""

    def end(reason: str, deployed: bool) -> State[Any]:
        def stop(*_: Any) -> None:
            raise Stopped(reason)

        store: Store = open_store(f"memory://{uuid.uuid4().hex}")
        question = SimpleNamespace(store=store, run_id="run", config=None, policies=["policy"])
        monkeypatch.setattr(evaluate, "asked", lambda *_: question)
        monkeypatch.setattr(evaluate, "evaluate_model", stop)
        monkeypatch.setattr(evaluate, "is_deployed", lambda: deployed)
        found: State[Any] = evaluate.evaluate.fn("run://run")
        return found

    return end


@pytest.mark.parametrize(
    ("reason", "deployed", "state"),
    [
        (SIGTERM, True, ("CRASHED", PREEMPTED)),
        (SIGTERM, False, ("CANCELLED", "Cancelled")),
        (STOP, True, ("CANCELLED", "Cancelled")),
    ],
)
def test_an_evaluation_whose_machine_is_taken_has_crashed_where_it_is_started_again(
    stopped: Callable[[str, bool], State[Any]], reason: str, deployed: bool, state: tuple[str, str]
) -> None:
    found = stopped(reason, deployed)
    assert (found.type.value, found.name) == state


def test_an_evaluation_that_crashes_at_every_start_fails_at_last() -> None:
    evaluate._refuse_circles(1 + CRASHES)
    with pytest.raises(ConfigError, match=f"was started {2 + CRASHES} times"):
        evaluate._refuse_circles(2 + CRASHES)

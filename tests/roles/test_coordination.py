"""How the flow of a coordinator ends when the store does not answer at its very end."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from flows.coordination import Coordination
from forge_core.config import load_config
from forge_core.runs.context import RunContext
from forge_core.runs.record import create_run
from forge_core.store import StoreError, open_store


def coordination() -> Any:
    """That of a run whose every step is committed."""
    record_of = {"run": {"id": "run"}, "rewards": {"functions": [{"path": "exact_match"}]}}
    store = open_store(f"memory://{uuid.uuid4().hex}")
    found: Any = object.__new__(Coordination)
    nothing = lambda *args: None
    found.run_id, found.steps = "run", 3
    found.context = RunContext(store, create_run(store, load_config(record_of)), role="coordinator")
    found._watcher = SimpleNamespace(__exit__=nothing)
    found._alarms = found._best_effort = SimpleNamespace(close=nothing)
    found._artifacts = SimpleNamespace(finish=nothing)
    return found


@pytest.mark.parametrize("outage", [StoreError("503"), TimeoutError("the read timed out")])
def test_a_finished_run_is_completed_though_its_figures_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, outage: Exception
) -> None:
    def down() -> None:
        raise outage

    run, closed = coordination(), list[bool]()
    monkeypatch.setattr(run.context.ledger, "entries", down)
    close = run.context.close
    monkeypatch.setattr(run.context, "close", lambda: closed.append(close() is None))
    with caplog.at_level("WARNING", logger="forge"):
        assert run.__exit__(None, None, None) is True
    assert run.outcome.is_completed()
    assert closed
    assert str(outage) in caplog.text

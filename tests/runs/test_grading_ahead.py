"""The grading processes start while the first batch is sampled: where that is right, and without a trace in the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from forge_core.rewards.actor import RewardActor
from forge_core.rewards.resolve import RewardError
from forge_core.runs import context
from forge_core.runs.context import RunContext
from forge_core.runs.record import create_run
from forge_core.store import open_store
from tests.runs.harness import memory, opened, tiny

REWARD = """
def reward(prompt, completion, metadata):
    return 1.0
"""
ENSEMBLE = "[{name: ensemble, verifiers: [{name: math}, {name: exact_match}, {name: last_integer}]}]"


def run(*overrides: str) -> RunContext:
    store = open_store(memory())
    return opened(RunContext(store, create_run(store, tiny(*overrides))))


def own(folder: Path, source: str = REWARD) -> str:
    (folder / "own_reward.py").write_text(source)
    return f"rewards.functions=[{{path: '{folder}/own_reward.py:reward'}}]"


def begin(ctx: RunContext, version: int = 0) -> None:
    """``start_grading``, to its end."""
    ctx.start_grading(version)
    for thread in threading.enumerate():
        if thread.name == "rewards-starting":
            thread.join()


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.fast
def test_processes_are_there_before_the_first_grade(tmp_path: Path) -> None:
    ctx = run(own(tmp_path))
    begin(ctx)
    assert isinstance(ctx.__dict__["rewards"], RewardActor)
    assert ctx.rewards.grade("2 + 2", "4", {}) == 1.0


@pytest.mark.fast
@pytest.mark.parametrize(("overrides", "version"), [((), 2), ((f"rewards.functions={ENSEMBLE}",), 0)])
def test_nothing_starts_where_nothing_is_left_or_a_model_may_be_loaded(
    overrides: tuple[str, ...], version: int
) -> None:
    ctx = run("steps=2", *overrides)
    begin(ctx, version)
    assert "rewards" not in ctx.__dict__


@pytest.mark.fast
def test_what_goes_wrong_is_met_by_whoever_grades(tmp_path: Path) -> None:
    ctx = run(own(tmp_path))
    (tmp_path / "own_reward.py").write_text("def reward(")
    begin(ctx)
    with pytest.raises(RewardError, match=r"own_reward.py:reward"):
        ctx.rewards  # noqa: B018


@pytest.mark.fast
def test_a_run_that_ends_meanwhile_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RewardActor] = []
    begun, over = threading.Event(), threading.Event()

    def slow(section: object) -> RewardActor:
        begun.set()
        over.wait(20)
        made.append(RewardActor.from_config(section))  # type: ignore[arg-type]
        return made[0]

    ctx = run(own(tmp_path))
    older = {child.pid for child in psutil.Process().children()}
    monkeypatch.setattr(context, "RewardActor", type("Slow", (), {"from_config": staticmethod(slow)}))
    ctx.start_grading(0)
    assert begun.wait(20)
    ctx.close()
    over.set()
    wait_for(lambda: not any(thread.name == "rewards-starting" for thread in threading.enumerate()))
    assert len(made) == 1
    assert {child.pid for child in psutil.Process().children()} <= older

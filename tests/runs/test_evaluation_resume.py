"""A resume with another window: each evaluation is recorded once, whatever became of its weights, and none is lost."""

from __future__ import annotations

import os

import pytest

from forge_core.config import ConfigError
from forge_core.runs.context import RunContext
from forge_core.runs.evaluation import evaluate
from forge_core.runs.frontier import Evaluation, Frontier, Rollout
from forge_core.runs.initialise import initialise
from forge_core.runs.record import load_run, resume_run
from forge_core.store import Store
from forge_core.store.memory import MemoryBackend
from forge_core.store.retention import collect
from tests.runs.harness import advance, memory, new_run, opened, tiny

pytestmark = pytest.mark.engine
NEWEST = "rollout.version=newest"


def resumed(ctx: RunContext, *overrides: str) -> RunContext:
    """The run as ``forge resume`` goes on with it, every change allowed."""
    keys = [override.partition("=")[0] for override in overrides]
    record = resume_run(ctx.store, load_run(ctx.store, ctx.run_id), tiny(*overrides), keys)
    again = opened(RunContext(ctx.store, record))
    again.rollouts.begin(again.ledger.head())
    return again


def recorded(ctx: RunContext) -> list[list[int]]:
    """The versions that each entry has the evaluation of."""
    metrics = [entry["metrics"] for entry in ctx.ledger.entries()]
    return [[m[name] for name in ("eval/before/version", "eval/version") if name in m] for m in metrics]


def without_old_weights(ctx: RunContext, version: int) -> RunContext:
    """``ctx`` after retention has deleted ``version``."""
    collect(ctx.store, ctx.run_id, staleness=0, keep_weights=2, keep_checkpoints=2, grace_s=0)
    assert not ctx.store.published(ctx.ledger.weights_prefix(version))
    return ctx


def test_a_larger_window_neither_repeats_nor_needs_what_an_entry_records_and_retention_deleted() -> None:
    ctx = without_old_weights(advance(new_run(memory(), "steps=8", "eval.interval=3", NEWEST), 5), 3)
    again = resumed(ctx, "steps=8", "eval.interval=3", NEWEST, "max_staleness=4")
    assert list(Frontier(again).sampling())[:1] == [Rollout(5, 0, 0, 5)]
    assert recorded(advance(again, 8)) == [[0], [], [], [3], [], [], [], [6, 8]]


def test_a_smaller_window_that_would_lose_an_evaluation_is_refused_and_the_named_remedy_records_it() -> None:
    given = ("eval.interval=0", NEWEST)
    ctx = advance(new_run(memory(), "steps=6", "max_staleness=4", *given), 2)
    refusal = r"evaluation of version 0 is not recorded.*`forge resume tiny steps=3 --allow-config-change steps`"
    with pytest.raises(ConfigError, match=refusal):
        resumed(ctx, "steps=6", "max_staleness=1", *given)
    assert load_run(ctx.store, ctx.run_id).changes == 0
    advance(resumed(ctx, "steps=3", "max_staleness=4", *given), 3)
    again = advance(resumed(ctx, "steps=6", "max_staleness=1", *given), 6)
    assert recorded(again) == [[], [], [0, 3], [], [], [6]]


def test_a_smaller_window_that_still_holds_an_open_evaluation_records_it() -> None:
    given = ("steps=5", "eval.interval=0", NEWEST)
    ctx = advance(new_run(memory(), "max_staleness=4", *given), 2)
    assert recorded(advance(resumed(ctx, "max_staleness=2", *given), 5)) == [[], [], [0], [], [5]]


def test_evaluations_may_be_switched_off_while_one_is_open() -> None:
    ctx = advance(new_run(memory(), "steps=5", "max_staleness=4", "eval.interval=0", NEWEST), 2)
    again = resumed(ctx, "steps=5", "max_staleness=1", "eval.interval=0", "eval.prompts=0", NEWEST)
    assert recorded(advance(again, 5)) == [[]] * 5


def test_a_change_that_asks_for_the_evaluation_of_deleted_weights_is_refused() -> None:
    ctx = without_old_weights(advance(new_run(memory(), "steps=8", "eval.interval=0", NEWEST), 5), 3)
    with pytest.raises(ConfigError, match=r"version 3 is to be evaluated, whose weights are deleted.*max_staleness=1"):
        resumed(ctx, "steps=8", "eval.interval=3", NEWEST, "max_staleness=4")
    resumed(ctx, "steps=8", "eval.interval=3", NEWEST, "max_staleness=1")


def test_a_window_that_needs_deleted_weights_to_sample_with_is_refused_and_the_named_one_works() -> None:
    given = ("steps=8", "eval.prompts=0", "rollout.version=oldest")
    ctx = without_old_weights(advance(new_run(memory(), "max_staleness=0", *given), 5), 3)
    with pytest.raises(ConfigError, match=r"batch 5 would be sampled by version 1 .*max_staleness=1 is the largest"):
        resumed(ctx, "max_staleness=4", *given)
    assert len(advance(resumed(ctx, "max_staleness=1", *given), 8).ledger.entries()) == 8


class Listening(MemoryBackend):
    """Notes what is looked up, and what is read."""

    def __init__(self) -> None:
        super().__init__(os.urandom(8).hex())
        self.looked_up: list[str] = []
        self.read_: list[str] = []

    def read(self, path: str) -> bytes:
        self.read_.append(path)
        return super().read(path)

    def exists(self, path: str) -> bool:
        self.looked_up.append(path)
        return super().exists(path)


def test_a_look_at_a_pending_evaluation_is_one_request_and_none_when_it_is_known_to_be_there() -> None:
    backend = Listening()
    ctx = new_run(Store(backend), "steps=8", "max_staleness=3", "eval.interval=0", NEWEST)
    initialise(ctx)
    frontier = Frontier(opened(RunContext(ctx.store, load_run(ctx.store, ctx.run_id), role="generator")))

    def look() -> tuple[list[Rollout | Evaluation], int]:
        """What there is to do, and how often its evaluations were asked for. Nothing else is read again."""
        backend.looked_up.clear()
        backend.read_.clear()
        work = list(frontier.sampling())
        return work, sum("/evaluations/" in path for path in backend.looked_up)

    look()
    work, asked = look()
    assert isinstance(work[0], Evaluation)
    assert {item.batch for item in work if isinstance(item, Rollout)} == {0, 1, 2, 3}
    assert (asked, backend.read_) == (1, [])
    evaluate(ctx, 0)
    look()
    assert (look()[1], backend.read_) == (0, [])

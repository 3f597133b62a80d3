"""An evaluation during training: worked on beside the steps, waited for by one of them, recorded with its figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from forge_core.evaluation.results import read_evaluation, summarise
from forge_core.rewards.resolve import RewardError
from forge_core.runs.context import RunContext
from forge_core.runs.evaluation import evaluate
from forge_core.runs.evaluation_schedule import evaluated_by, evaluation_due, unrecorded
from forge_core.runs.initialise import initialise
from forge_core.runs.stages import sampling_version
from forge_core.runs.training import train_batch
from forge_core.stop import Stopped
from forge_core.store import layout
from tests.runs.harness import advance, decided, make_batch, memory, new_run, reopened, tiny

pytestmark = pytest.mark.engine


def until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def has_trained(ctx: RunContext, version: int) -> bool:
    """Whether some weights of ``version`` are published, committed or not."""
    prefix = layout.weights(ctx.run_id, version, ctx.attempt)
    return ctx.store.published(prefix)


def test_a_step_trains_and_publishes_while_its_version_is_being_evaluated_and_then_waits() -> None:
    ctx = new_run(memory(), "steps=2")
    initialise(ctx)
    make_batch(ctx, 0)
    ctx.evaluating.acquire()  # an evaluation is going on
    thread, errors = in_thread(lambda: train_batch(ctx, 0))
    until(lambda: has_trained(ctx, 1))
    assert ctx.ledger.head() == 0, "the engine stays at the version until its evaluation is there"
    time.sleep(0.3)
    ctx.evaluating.release()
    thread.join(60)
    assert errors == []
    metrics = ctx.ledger.required(0)["metrics"]
    assert metrics["eval/version"] == 0
    assert metrics["time/eval"] >= 0.3


def test_inside_the_window_steps_commit_while_an_evaluation_goes_on_and_the_engine_stays_at_its_version() -> None:
    ctx = new_run(memory(), "steps=6", "max_staleness=2", "eval.interval=3", "rollout.version=newest")
    initialise(ctx)
    for batch in (0, 1, 2):
        make_batch(ctx, batch)
    ctx.evaluating.acquire()  # the evaluation of version 0 is going on
    for batch in (0, 1):
        assert "eval/version" not in train_batch(ctx, batch)["metrics"]
    assert sampling_version(ctx, 2) == 0, "newer ones may not sample yet"
    recording, errors = in_thread(lambda: train_batch(ctx, 2))
    ahead, more_errors = in_thread(lambda: make_batch(ctx, 3))  # which needs version 1
    until(lambda: has_trained(ctx, 3))
    time.sleep(0.3)
    assert ctx.ledger.head() == 2
    assert ctx.generator(0).get_version() == 0
    ctx.evaluating.release()
    recording.join(60)
    ahead.join(60)
    assert (errors, more_errors) == ([], [])
    metrics = ctx.ledger.required(2)["metrics"]
    assert metrics["eval/version"] == 0
    assert metrics["time/eval"] >= 0.3
    assert ctx.generator(0).get_version() >= 1


def test_a_run_that_was_killed_before_an_evaluation_was_there_records_what_an_uninterrupted_one_does() -> None:
    given = ("steps=4", "max_staleness=1", "eval.interval=2")
    whole = advance(new_run(memory(), *given), 4)
    begun = advance(new_run(memory(), *given), 1)
    assert begun.store.list(f"{layout.run(begun.run_id)}evaluations") == []
    assert decided(advance(reopened(begun), 4)) == decided(whole)
    recorded = [entry["metrics"].get("eval/version") for entry in whole.ledger.entries()]
    assert recorded == [None, 0, None, 4]
    assert whole.ledger.required(3)["metrics"]["eval/before/version"] == 2


@pytest.mark.parametrize("interval", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10])
def test_each_evaluation_is_recorded_once_within_the_window_and_before_the_next(
    steps: int, staleness: int, interval: int
) -> None:
    config = tiny(f"steps={steps}", f"max_staleness={staleness}", f"eval.interval={interval}")
    by = {version: batch for batch in range(steps) for version in evaluated_by(config, batch)}
    due = [version for version in range(steps) if evaluation_due(config, version)]
    assert sorted(v for b in range(steps) for v in evaluated_by(config, b)) == [*due, steps]
    assert all(v <= by[v] <= v + staleness for v in due)
    assert all(by[v] < w for v, w in pairwise(due))
    assert all(len(evaluated_by(config, batch)) <= 1 for batch in range(steps - 1))
    assert len(evaluated_by(config, steps - 1)) <= 2
    for head in range(steps):
        assert unrecorded(config, head) == [v for v in due if v <= head <= by[v]]


def test_an_evaluation_that_is_there_costs_the_step_nothing_and_is_not_made_again() -> None:
    ctx = new_run(memory(), "steps=2")
    initialise(ctx)
    make_batch(ctx, 0)
    prefix = evaluate(ctx, 0)
    manifest = ctx.store.open_published(prefix).manifest
    ctx.forget_generator()
    train_batch(ctx, 0)
    assert ctx._generator is None, "nothing was sampled"
    assert ctx.store.open_published(prefix).manifest == manifest


def test_a_stop_ends_a_step_that_waits_for_an_evaluation() -> None:
    ctx = new_run(memory(), "steps=2")
    initialise(ctx)
    make_batch(ctx, 0)
    ctx.evaluating.acquire()
    thread, errors = in_thread(lambda: train_batch(ctx, 0))
    until(lambda: has_trained(ctx, 1))
    ctx.stop.set("Ctrl-C")
    ctx.evaluating.release()  # as the evaluation that is stopped does
    thread.join(60)
    assert [type(e) for e in errors] == [Stopped]
    assert ctx.ledger.head() == 0
    assert advance(reopened(ctx), 2).ledger.head() == 2


def test_an_evaluation_during_an_outage_of_the_verifier_is_an_error_and_not_stored() -> None:
    ctx = new_run(memory(), "steps=2", "rewards.functions.0.path=tests.runs.rewards:broken")
    initialise(ctx)
    with pytest.raises(RewardError, match=r"8 of 8 grades failed, more than rewards\.max_error_share=0\.5"):
        evaluate(ctx, 0)
    assert ctx.store.list(f"{layout.run(ctx.run_id)}evaluations") == []
    broken = "rewards.functions.0.path=tests.runs.rewards:broken"
    accepted = new_run(memory(), "steps=2", broken, "rewards.max_error_share=1")
    initialise(accepted)
    make_batch(accepted, 0)
    metrics = train_batch(accepted, 0)["metrics"]
    assert metrics["eval/failed_grades"] == 8
    assert "eval/reward/mean" not in metrics, "not measured is not 0"


def test_the_ledger_has_the_figures_of_the_evaluation() -> None:
    ctx = advance(new_run(memory(), "steps=1", "eval.samples=4", "eval.prompts=12"), 1)
    metrics = ctx.ledger.required(0)["metrics"]
    prefix = layout.evaluation(ctx.run_id, 1, ctx.weights_content(1))
    summary = summarise(read_evaluation(ctx.store, prefix))
    assert metrics["eval/reward/mean"] == summary.reward.mean
    assert (metrics["eval/reward/low"], metrics["eval/reward/high"]) == (summary.reward.low, summary.reward.high)
    assert {k: metrics[f"eval/pass@{k}"] for k in (1, 2, 4)} == summary.passes
    assert metrics["eval/response/mean_tokens"] == summary.mean_tokens
    assert metrics["eval/response/truncated_share"] == summary.truncated
    assert metrics["eval/before/version"] == 0

"""An evaluation during training: worked on beside the step, waited for before its commit, recorded with its figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from forge_core.evaluation.results import read_evaluation, summarise
from forge_core.rewards.resolve import RewardError
from forge_core.runs.context import RunContext
from forge_core.runs.evaluation import evaluate
from forge_core.runs.initialise import initialise
from forge_core.runs.training import train_batch
from forge_core.stop import Stopped
from forge_core.store import layout
from tests.runs.harness import advance, make_batch, memory, new_run, reopened

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

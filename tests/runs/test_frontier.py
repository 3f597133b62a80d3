"""What roles find to do in a run's store: an evaluation keeps a generator busy, and holds up no training step."""

from __future__ import annotations

import pytest

from forge_core.runs.context import RunContext
from forge_core.runs.evaluation import evaluate
from forge_core.runs.frontier import Evaluation, Frontier, Rollout, Step
from forge_core.runs.initialise import initialise
from forge_core.runs.record import load_run
from forge_core.runs.training import train_batch
from tests.runs.harness import make_batch, memory, new_run, opened

pytestmark = pytest.mark.engine


def seen_by(ctx: RunContext, role: str) -> Frontier:
    return Frontier(opened(RunContext(ctx.store, load_run(ctx.store, ctx.run_id), role=role)))


def test_a_step_is_due_while_its_version_is_still_evaluated_and_both_roles_have_work() -> None:
    ctx = new_run(memory(), "steps=2", "rollout.version=newest")
    initialise(ctx)
    make_batch(ctx, 0)
    trainer, generator = seen_by(ctx, "trainer"), seen_by(ctx, "generator")
    assert trainer.step() == Step(0)
    assert list(generator.sampling()) == [Evaluation(0, ctx.weights_content(0))]
    assert trainer.waiting_for() == {"trainer", "generator"}
    evaluate(ctx, 0)
    assert list(generator.sampling()) == []
    assert trainer.waiting_for() == {"trainer"}
    train_batch(ctx, 0)
    assert trainer.waiting_for() == {"generator"}, "batch 1 is to be sampled; version 1 is not evaluated"
    assert not [work for work in generator.sampling() if isinstance(work, Evaluation)]


def test_a_batch_that_needs_a_newer_version_is_not_due_until_the_evaluation_is_there() -> None:
    ctx = new_run(memory(), "steps=4", "max_staleness=1", "rollout.version=newest")
    initialise(ctx)
    make_batch(ctx, 0)
    generator = seen_by(ctx, "generator")
    train_batch(ctx, 0)
    evaluation, *rollouts = generator.sampling()
    assert evaluation == Evaluation(0, ctx.weights_content(0))
    assert [(work.batch, work.version) for work in rollouts if isinstance(work, Rollout)] == [(1, 0), (1, 0)]
    assert seen_by(ctx, "trainer").waiting_for() == {"generator"}
    evaluate(ctx, 0)
    found = [(work.batch, work.version) for work in generator.sampling() if isinstance(work, Rollout)]
    assert found == [(1, 1), (1, 1), (2, 1), (2, 1)]

"""A run ends when validation says so, and keeps its best version."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.runs.early_end import ends_early, is_finished, validation_losses
from forge_core.runs.record import load_run
from forge_core.runs.versions import best_version
from tests.sft.harness import advance, memory, new_run, tiny


@pytest.mark.parametrize(
    ("losses", "ended"),
    [
        ([], False),
        ([3.0, 2.0, 2.1], False),
        ([3.0, 2.0, 2.1, 2.2], True),
        ([3.0, 2.0, 2.1, 1.9, 1.95], False),
        ([3.0, 2.0, 2.0, 2.0], True),
    ],
)
def test_two_validations_in_a_row_without_a_lower_loss_end_a_run_with_patience_two(losses: list[float], ended: bool):
    assert ends_early(tiny(Path("data.jsonl"), "validation.patience=2"), losses) is ended


def test_a_loss_that_is_hardly_lower_does_not_count():
    config = tiny(Path("data.jsonl"), "validation.patience=1", "validation.min_delta=0.1")
    assert ends_early(config, [3.0, 2.95])
    assert not ends_early(config, [3.0, 2.85])


def test_without_patience_nothing_ends_a_run():
    assert not ends_early(tiny(Path("data.jsonl")), [1.0, 2.0, 3.0, 4.0])


@pytest.mark.engine
def test_a_run_whose_loss_rises_is_finished_and_its_best_version_stays(data: Path):
    """A learning rate far too high: the loss falls, then rises."""
    settings = ("steps=12", "training.learning_rate=0.1", "validation.patience=2", "gc.grace=0", "weights.keep=1")
    ctx = new_run(memory(), data, *settings)
    while not is_finished(ctx.store, load_run(ctx.store, ctx.run_id)):
        advance(ctx, max(0, ctx.ledger.head()) + 1)
    losses = validation_losses(ctx.ledger.entries())
    assert len(losses) < 12
    best = best_version(ctx.store, ctx.run_id)
    assert best.version == losses.index(min(losses)) + 1
    ctx.background.close(timeout=30.0)
    assert ctx.store.published(ctx.ledger.weights_prefix(best.version))

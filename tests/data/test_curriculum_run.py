"""A real run whose prompts go from easy to hard."""

from __future__ import annotations

import json

import pytest

from forge_core.config import ConfigError
from forge_core.data.cursor import Cursor
from forge_core.runs.context import RunContext
from forge_core.runs.initialise import initialise
from forge_core.runs.record import resume_run
from forge_core.runs.refilling import refill
from forge_core.runs.training import train_batch
from tests.runs.harness import advance, decided, make_batch, memory, new_run, reopened, tiny

pytestmark = pytest.mark.engine
LEVELS = 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """48 prompts on three levels: two batches of eight groups each."""
    file = tmp_path_factory.mktemp("curriculum") / "digits.jsonl"
    rows = [{"prompt": f"s:{i:02d}=", "answer": "1", "level": i % LEVELS} for i in range(48)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"dataset={{path: {file}, curriculum: {{column: level}}}}", "eval.prompts=0", "steps=6"]


def levels(ctx: RunContext, batches: int) -> list[int]:
    return [group["row"] % LEVELS for batch in range(batches) for group in ctx.plan(batch)["groups"]]


def test_a_run_visits_the_levels_in_order_and_an_interrupted_one_does_the_same(settings: list[str]):
    whole = advance(new_run(memory(), *settings), 6)
    assert levels(whole, 6) == [0] * 16 + [1] * 16 + [2] * 16
    parts = advance(new_run(memory(), *settings), 3)
    again = advance(reopened(parts), 6)
    assert decided(again) == decided(whole)
    assert again.ledger.entry(2)["cursor"] == {"epoch": 0, "index": 24}
    assert again.planner.curriculum.level(Cursor(**again.ledger.entry(2)["cursor"])) == 1
    with pytest.raises(ConfigError, match=r"dataset\.curriculum\.column"):
        resume_run(again.store, again.record, tiny(*settings, "dataset.curriculum.column=answer"))


def test_rounds_that_refill_a_batch_are_no_harder_than_it(settings: list[str]):
    ctx = new_run(memory(), *settings, "filters.dynamic_sampling=true", "grpo.n_samples=2", "training.batch_size=16")
    initialise(ctx)
    for batch in range(3):
        make_batch(ctx, batch)
        refill(ctx, batch)
        train_batch(ctx, batch)
    rounds = [(batch, plan) for batch in range(3) for plan in ctx.rounds(batch)]
    extra = [(batch, group["row"] % LEVELS) for batch, plan in rounds if plan["round"] for group in plan["groups"]]
    assert extra
    assert all(level <= batch // 2 for batch, level in extra)

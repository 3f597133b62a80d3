"""What a supervised training step computes: what a plain loop over transformers' model computes."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.data.loader import build_loader
from forge_core.data.prompts import held_out, prompt_id
from forge_core.runs.sft_context import SftContext
from forge_core.runs.step_metrics import model_flops
from forge_core.store import layout
from forge_core.training.packed_rows import PackedRows
from tests.sft.harness import advance, decided, memory, new_run, reopened, tiny

pytestmark = pytest.mark.engine


def exported(ctx: SftContext, version: int) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ctx.weights_dir(version), dtype=torch.float32)


def document_losses(model: Any, rows: PackedRows) -> list[torch.Tensor]:
    """Of each document, alone in its batch: minus the log-probabilities of its target tokens."""
    found = []
    for number in range(rows.documents):
        here = rows.document_ids == number
        tokens, targets, counts = (x[here] for x in (rows.input_ids, rows.target_ids, rows.target_mask))
        logits = model(torch.tensor(tokens[None]).long()).logits[0].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(targets[:, None]).long()).squeeze(-1)
        found.append(-logprobs[torch.tensor(counts)])
    return found


def first_rows(ctx: SftContext, steps: int) -> list[PackedRows]:
    """The rows of the first optimizer steps, from a loader of our own."""
    config = ctx.sft
    loader = build_loader(config.dataset, ctx.tokenizer, config.training.seq_len, seed=config.run.seed)
    return [PackedRows.of(list(islice(loader, config.rows_per_optimizer_step))) for _ in range(steps)]


def test_optimizer_steps_are_those_of_a_plain_loop_that_divides_by_all_target_tokens_and_clips(data: Path):
    """Two accumulation steps, micro-batches of two rows, clipping: the weights are the plain loop's."""
    settings = ("training.gradient_accumulation_steps=2", "training.max_norm=0.5", "training.eps=1e-4")
    ctx = advance(new_run(memory(), data, *settings), 1)
    model, rows = exported(ctx, 0), first_rows(ctx, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    losses = []
    for step in rows:
        loss = torch.cat(document_losses(model, step)).sum() / step.target_mask.sum()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert ctx.ledger.required(0)["metrics"]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    ours = exported(ctx, 1).state_dict()
    for name, theirs in model.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-4, atol=2e-5, msg=name)


def test_the_exported_models_loss_by_transformers_is_the_validation_loss(data: Path):
    ctx = advance(new_run(memory(), data), 1)
    assert ctx.validation is not None
    with torch.no_grad():
        loss = torch.cat(document_losses(exported(ctx, 1), ctx.validation)).mean()
    assert ctx.ledger.required(0)["metrics"]["validation/loss"] == pytest.approx(float(loss), rel=1e-5)


def test_how_a_step_is_split_into_micro_batches_changes_nothing_but_rounding(data: Path):
    one = advance(new_run(memory(), data, "training.token_budget=48"), 2)
    other = advance(new_run(memory(), data, "training.token_budget=192"), 2)
    losses = [[e["metrics"]["loss"] for e in ctx.ledger.entries()] for ctx in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_each_entry_says_what_was_trained_on_and_how_fast(data: Path):
    ctx = advance(new_run(memory(), data), 2)
    first, second = ctx.ledger.entries()
    rows = first_rows(ctx, 2)
    assert first["tokens"] == sum(step.tokens for step in rows)
    assert first["episodes"] == {
        "planned": sum(len(s) for s in rows),
        "trained": sum(len(s) for s in rows),
        "dropped": {},
    }
    metrics = first["metrics"]
    assert metrics["data/target_tokens"] == sum(int(step.target_mask.sum()) for step in rows)
    assert metrics["data/packed"] == pytest.approx(first["tokens"] / (8 * 48))
    assert metrics["time/tokens_per_second"] == pytest.approx(first["tokens"] / metrics["time/train"])
    assert second["metrics"]["packing/rows"] == 16
    lengths = [length for step in rows for length in step.lengths]
    model = json.loads((ctx.weights_dir(0) / "config.json").read_text())
    squares = sum(length**2 for length in lengths)
    assert squares > sum(lengths) ** 2 / len(lengths), "they differ"
    assert metrics["trainer/model_flops"] == model_flops(model, sum(lengths), squares)


def test_a_run_that_validates_nothing_has_no_validation_loss(data: Path):
    ctx = advance(new_run(memory(), data, "dataset.holdout=0"), 1)
    assert "validation/loss" not in ctx.ledger.required(0)["metrics"]
    assert not tiny(data, "dataset.holdout=0").validates


def test_what_is_validated_on_is_what_is_held_out_and_never_trained_on(data: Path):
    ctx = advance(new_run(memory(), data, "validation.rows=1000"), 1)
    assert ctx.validation is not None
    told = lambda rows: {t for t in ctx.tokenizer.decode(rows.input_ids.flatten()).split("s:") if "=" in t}
    asked = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
    held = {p for p in asked if held_out(prompt_id([{"role": "user", "content": p}]), 0.1)}
    assert {f"s:{text.partition('=')[0]}=" for text in told(ctx.validation)} == held
    trained = {f"s:{text.partition('=')[0]}=" for rows in first_rows(ctx, 20) for text in told(rows)}
    assert len(trained) > 200
    assert not trained & held


def test_another_set_may_be_validated_on(data: Path):
    ctx = advance(new_run(memory(), data, "dataset.holdout=0", f"validation.dataset.path={data}"), 1)
    assert ctx.ledger.required(0)["metrics"]["validation/loss"] > 0


def test_checkpoints_come_every_interval_and_at_the_end_and_old_weights_go(data: Path):
    ctx = advance(new_run(memory(), data, "steps=5", "checkpoint.interval=2", "gc.grace=0"), 5)
    ctx.background.close(timeout=30.0)
    prefixes = ctx.store.folders(f"{layout.run(ctx.run_id)}checkpoints")
    assert [int(name.partition("-")[0]) for name in prefixes][-1] == 4
    assert decided(reopened(ctx)) == decided(ctx)

"""A training step of a supervised run: take rows, step, validate, publish, commit.

Invariants:
- As in ``training.py``: weights (and the adapter) are published first, then the ledger entry makes the version exist,
  only then, when due, comes the checkpoint.
- The entry's cursor is where the data loader stands after the step: the next step takes what follows it.
"""

from __future__ import annotations

import time
from typing import Any

from forge_core.config.sft_config import SftConfig
from forge_core.runs.record import now
from forge_core.runs.sft_context import SftContext
from forge_core.runs.sft_rows import Taken
from forge_core.runs.sft_session import SftStep
from forge_core.runs.step_metrics import work_metrics
from forge_core.runs.trainer_session import Outcome
from forge_core.runs.training import commit_step, committed_step, publish_weights
from forge_core.runs.versions import VALIDATION
from forge_core.store import digest, layout
from forge_core.training.packed_rows import PackedRows

NO_EPISODES = {"plans": [], "shards": {"episodes": [], "rewards": [], "reference": []}, "training": "", "max_age": 0}


def train_rows(ctx: SftContext, batch: int) -> dict[str, Any]:
    """Take training step ``batch`` unless it is committed; returns its ledger entry.

    Called again after an I/O error it goes on where that struck, be it after the commit.
    """
    return committed_step(ctx, batch, _take_step)


def _take_step(ctx: SftContext, batch: int) -> dict[str, Any]:
    started_at, started = now(), time.monotonic()
    held_out = ctx.validation if validation_due(ctx.sft, batch) else None  # bad data are found before a model is loaded
    outcome = ctx.trainer.learn(SftStep(batch))
    taken = ctx.rows.taken(batch)
    validated = _validated(ctx, batch, held_out)
    publishing = time.monotonic()
    weights, weights_digest = publish_weights(ctx, batch, outcome)
    adapter = _publish_adapter(ctx, batch, outcome)
    work = work_metrics(ctx, weights, taken.lengths)
    times = {"time/publish": time.monotonic() - publishing, "time/step": time.monotonic() - started}
    return commit_step(
        ctx,
        {
            "batch": batch,
            "version_in": batch,
            "version_out": batch + 1,
            "episodes": {"planned": taken.documents, "trained": taken.documents, "dropped": {}},
            "tokens": taken.tokens,
            **NO_EPISODES,
            "training_digest": "",
            "weights": weights,
            "weights_digest": weights_digest,
            **adapter,
            "previous": ctx.ledger.previous(batch),
            "state_digest": outcome.state_digest,
            "cursor": taken.cursor,
            "metrics": {**outcome.metrics, **_data_metrics(taken, outcome), **work, **validated, **times},
            "attempt": ctx.attempt,
            "started_at": started_at,
            "finished_at": now(),
        },
    )


def _data_metrics(taken: Taken, outcome: Outcome) -> dict[str, float]:
    """What was trained on, and how fast: tokens of documents, without padding, a second of the trainer's work."""
    return {
        **taken.metrics,
        "data/target_tokens": taken.targets,
        "data/packed": taken.tokens / taken.positions,
        "time/tokens_per_second": taken.tokens / outcome.metrics["time/train"],
    }


def _validated(ctx: SftContext, batch: int, held_out: PackedRows | None) -> dict[str, float]:
    """The loss of the version that step ``batch`` makes, where it is due."""
    if held_out is None:
        return {}
    started = time.monotonic()
    loss = ctx.trainer.validate(batch + 1, held_out)
    return {VALIDATION: loss, "time/validation": time.monotonic() - started}


def validation_due(config: SftConfig, batch: int) -> bool:
    """After every ``validation.interval`` steps, and after the last."""
    interval = config.validation.interval
    return config.validates and (batch + 1 == config.steps or (batch + 1) % interval == 0)


def _publish_adapter(ctx: SftContext, batch: int, outcome: Outcome) -> dict[str, str]:
    """The entry's ``adapter`` and its digest, where adapters are trained."""
    if ctx.sft.lora is None:
        return {}
    prefix = layout.adapter(ctx.run_id, batch + 1, ctx.attempt)
    request = digest({"stage": "adapter", "state": outcome.state_digest})
    if not ctx.store.published(prefix):
        ctx.store.publish_uploaded(prefix, ctx.trainer.upload_adapter(prefix), request=request)
    return {"adapter": prefix, "adapter_digest": ctx.store.open_published(prefix, request=request).manifest.content}

"""A training step: consume a batch, step, publish, commit.

Invariants (DESIGN section 3): weights and training table are published first, under this attempt's id; then the ledger
entry makes the version exist; only then, when due, the checkpoint. A second trainer loses at the ledger and stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from forge_core.config.any_config import AnyConfig
from forge_core.data_model import TRAINING, to_parquet
from forge_core.observability.metrics import collecting
from forge_core.runs.consumption import StepData, data_metrics, episode_counts, load_step, stage_seconds
from forge_core.runs.context import RunContext
from forge_core.runs.episodes import TRAINING_FILE
from forge_core.runs.evaluation import evaluation_metrics
from forge_core.runs.garbage import collect_garbage
from forge_core.runs.grading_metrics import grading_metrics
from forge_core.runs.record import now
from forge_core.runs.recording import recorded_by_trainer
from forge_core.runs.redo import off_policy
from forge_core.runs.step_metrics import component_spread, fate_metrics, trained_lengths, work_metrics
from forge_core.runs.trainer_session import Outcome
from forge_core.store import digest, layout

C = TypeVar("C", bound=RunContext)
COLLECT_EVERY = 20  # training steps between collections where no checkpoint is due
IDLE = {"loss": 0.0, "entropy": 0.0, "kl": 0.0, "grad_norm": 0.0}  # metrics of a step that had nothing to train


class LostRace(RuntimeError):
    """Another trainer committed this training step first."""


def train_batch(ctx: RunContext, batch: int) -> dict[str, Any]:
    """Take training step ``batch`` unless it is committed; returns its ledger entry.

    Called again after an I/O error it goes on where that struck, be it after the commit.
    """
    return committed_step(ctx, batch, _take_step)


def committed_step(ctx: C, batch: int, take: Callable[[C, int], dict[str, Any]]) -> dict[str, Any]:
    """The ledger entry of training step ``batch``, which ``take`` takes if it is not there; with its checkpoint, where
    one is due and this process has committed the step."""
    with collecting(keep=True):
        entry = ctx.ledger.entry(batch) or take(ctx, batch)
    if entry["attempt"] == ctx.attempt and checkpoint_due(ctx.config, batch):
        ensure_checkpoint(ctx, entry)
    return entry


def _take_step(ctx: RunContext, batch: int) -> dict[str, Any]:
    started_at, started = now(), time.monotonic()
    data = load_step(ctx, batch)
    loaded = time.monotonic()
    outcome = ctx.trainer.learn(data)
    stepped = time.monotonic()
    with ThreadPoolExecutor(1, "describing") as beside:
        description = beside.submit(copy_context().run, _described, ctx, data)
        weights, weights_digest = publish_weights(ctx, batch, outcome)
        published = time.monotonic()
    training, training_digest, measured = description.result()
    times = {"time/load": loaded - started, "time/publish": published - stepped, **stage_seconds(ctx, data)}
    evaluated = _evaluated(ctx, batch, weights)
    work = work_metrics(ctx, weights, trained_lengths(data), ctx.config.training.epochs_per_batch)
    idle = {} if outcome.stepped else IDLE
    entry = {
        "batch": batch,
        "version_in": batch,
        "version_out": batch + 1,
        "max_age": max((f.age for f in data.fates if f.trained), default=0),
        "episodes": episode_counts(data.fates),
        "tokens": sum(sum(e.response_mask) for e in data.generated),
        "plans": [layout.plan(ctx.run_id, batch, plan["round"]) for plan in data.plans],
        "shards": data.shards,
        "training": training,
        "training_digest": training_digest,
        "weights": weights,
        "weights_digest": weights_digest,
        "previous": ctx.ledger.previous(batch),
        "state_digest": outcome.state_digest,
        "cursor": data.plans[0]["cursor"]["after"],
        "metrics": {**idle, **measured, **work, **outcome.metrics, **evaluated, **times},
        **off_policy(ctx, data),
        "attempt": ctx.attempt,
        "started_at": started_at,
        "finished_at": now(),
    }
    entry["metrics"]["time/step"] = time.monotonic() - started
    return commit_step(ctx, entry)


def commit_step(ctx: RunContext, entry: dict[str, Any]) -> dict[str, Any]:
    """Commit ``entry`` and tell those who wait for it. Raises LostRace."""
    batch = entry["batch"]
    entry["metrics"] |= ctx.space.measured()
    with recorded_by_trainer() as recorded:
        entry |= recorded
        committed = ctx.ledger.commit(entry)
    if not committed:
        winner = ctx.ledger.entry(batch)
        raise LostRace(
            f"training step {batch} of run {ctx.run_id!r} was committed by another trainer (attempt "
            f"{winner['attempt'] if winner else '?'}); this one (attempt {ctx.attempt}) stops: one trainer per run"
        )
    ctx.candidates.pop(batch + 1, None)
    if checkpoint_due(ctx.config, batch) or (batch + 1) % COLLECT_EVERY == 0:
        ctx.background.submit(collect_garbage, ctx.store, ctx.record)
    for observer in ctx.observers:
        observer(entry)
    return entry


def ensure_checkpoint(ctx: RunContext, entry: dict[str, Any]) -> None:
    """Publish the checkpoint of the committed ``entry``, unless it is there."""
    if not ctx.store.published(layout.checkpoint(ctx.run_id, entry["batch"], entry["attempt"])):
        ctx.trainer.checkpoint(entry)


def checkpoint_due(config: AnyConfig, batch: int) -> bool:
    """After every ``checkpoint.interval`` steps, and after the last."""
    interval = config.checkpoint.interval
    return batch + 1 == config.steps or (interval > 0 and (batch + 1) % interval == 0)


def publish_weights(ctx: RunContext, batch: int, outcome: Outcome) -> tuple[str, str]:
    """Prefix and content digest of version ``batch + 1``: new weights, or the old ones when nothing was trained."""
    if not outcome.stepped:
        prefix = ctx.ledger.weights_prefix(batch)
        return prefix, ctx.store.open_published(prefix).manifest.content
    prefix = layout.weights(ctx.run_id, batch + 1, ctx.attempt)
    request = digest({"stage": "weights", "state": outcome.state_digest, "dtype": ctx.config.weights_dtype})
    if ctx.store.published(prefix):  # by a try of this step whose commit failed
        return prefix, ctx.store.open_published(prefix, request=request).manifest.content
    with ctx.weights.scratch() as folder:
        files = ctx.trainer.upload_weights(prefix, folder)
        manifest = ctx.store.publish_uploaded(prefix, files, request=request)
        ctx.weights.adopt(manifest, folder)
    return prefix, manifest.content


def _described(ctx: RunContext, data: StepData) -> tuple[str, str, dict[str, float]]:
    """Prefix and digest of the ``training`` table, and the metrics that need no model."""
    training, training_digest = publish_fates(ctx, data)
    metrics = {
        **data_metrics(data, played=ctx.config.environment is not None),
        **fate_metrics(data),
        **component_spread(data),
        **grading_metrics(ctx, data.shards["rewards"]),
    }
    return training, training_digest, metrics


def publish_fates(ctx: RunContext, data: StepData) -> tuple[str, str]:
    """Prefix and content digest of the ``training`` table."""
    prefix = layout.training(ctx.run_id, data.batch, ctx.attempt)
    rows = [fate.row() for fate in data.fates]
    manifest = ctx.store.publish(prefix, {TRAINING_FILE: to_parquet(rows, TRAINING)}, request=digest(rows))
    return prefix, manifest.content


def _evaluated(ctx: RunContext, batch: int, weights: str) -> dict[str, float]:
    """The evaluation that this entry records: of the last version, before it commits (and, under ``eval/before/``, of
    one before, if the entry has to record that too); else of ``batch``, or of a version that was made not long before
    (``eval/version``). ``time/eval``: how long the step waited."""
    versions = [] if ctx.record.parent else ctx.evaluations.recorded_in(batch)  # with a parent nothing is generated
    if not versions:
        return {}
    if batch + 1 in versions:
        ctx.candidates[batch + 1] = weights
    started = time.monotonic()
    for version in versions:
        ctx.evaluate(ctx, version)
    *before, last = [evaluation_metrics(ctx, version) for version in versions]
    earlier = {name.replace("eval/", "eval/before/", 1): x for metrics in before for name, x in metrics.items()}
    return {**earlier, **last, "time/eval": time.monotonic() - started}

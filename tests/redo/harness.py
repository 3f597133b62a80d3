"""What ``flows/redo.py`` does, without Prefect."""

from __future__ import annotations

import hashlib

from forge_core.runs.context import RunContext
from forge_core.runs.initialise import initialise
from forge_core.runs.record import create_run, load_run
from forge_core.runs.redo import reuse_batch, reuse_reference
from forge_core.runs.redo_rewards import rescore_batch
from forge_core.runs.redo_setup import Redo, rescore_of, retrain_of
from forge_core.runs.training import train_batch
from forge_core.store import Store, layout
from tests.runs.harness import opened

LOW, HIGH = "tests.runs.rewards:first_digit", "tests.redo.rewards:high_digits"


def begun(store: Store, redo: Redo) -> RunContext:
    return opened(RunContext(store, create_run(store, redo.config, redo.parent)))


def reopened(ctx: RunContext) -> RunContext:
    """The same run as another process would open it."""
    return opened(RunContext(ctx.store, load_run(ctx.store, ctx.run_id)))


def rescored(ctx: RunContext, until: int | None = None) -> RunContext:
    for batch in range(until if until is not None else ctx.config.steps):
        rescore_batch(ctx, batch, reuse_batch(ctx, batch))
    return ctx


def retrained(ctx: RunContext, until: int | None = None) -> RunContext:
    initialise(ctx)
    for batch in range(max(0, ctx.ledger.head()), until if until is not None else ctx.config.steps):
        shards = reuse_batch(ctx, batch)
        if ctx.config.grpo.beta > 0:
            reuse_reference(ctx, batch, shards)
        train_batch(ctx, batch)
    return ctx


def new_rescore(store: Store, parent: str, name: str, *rewards: str) -> RunContext:
    return begun(store, rescore_of(store, parent, [f"run.id={name}"], rewards or [HIGH]))


def new_retrain(
    store: Store, parent: str, name: str, *overrides: str, loss: str | None = None, start: int = 0
) -> RunContext:
    return begun(store, retrain_of(store, parent, [f"run.id={name}", *overrides], loss, start))


def fingerprint(store: Store, run_id: str) -> dict[str, str]:
    """Every object of a run by key, as the digest of its bytes."""
    return {key: hashlib.sha256(store.read(key)).hexdigest() for key in store.list(layout.run(run_id))}

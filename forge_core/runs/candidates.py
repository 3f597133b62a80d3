"""Candidates: a version that the trainer has published and is about to commit, evaluated by another process first.

Invariants: a candidate is no version, and no one samples training episodes with it; each try of a step announces its
own, and the newest announcement is the one to evaluate.
"""

from __future__ import annotations

from typing import Any

from forge_core.runs.context import RunContext
from forge_core.store import NotFound, layout
from forge_core.store.manifest import MANIFEST


def evaluated_elsewhere(ctx: RunContext, version: int) -> str:
    """Wait until a generator has evaluated ``version``, which is announced where it is this process's candidate; the
    prefix of the evaluation. Raises Overdue after ``roles.wait_s``."""
    weights = ctx.weights_content(version)
    prefix = layout.evaluation(ctx.run_id, version, weights)
    if not ctx.store.published(prefix):
        if version in ctx.candidates:
            announce(ctx, version, {"weights": ctx.candidates[version], "weights_digest": weights})
        ctx.store.wait_for(prefix + MANIFEST, timeout_s=ctx.config.roles.wait_s, stop=ctx.stop)
    return prefix


def announce(ctx: RunContext, version: int, body: dict[str, Any]) -> None:
    number = 0
    while not ctx.store.put_new_json(layout.candidate(ctx.run_id, version, number), body):
        number += 1


def newest_candidate(ctx: RunContext, version: int) -> dict[str, Any] | None:
    """The newest announced candidate of ``version``, if there is one."""
    newest, number = None, 0
    while (found := _read(ctx, version, number)) is not None:
        newest, number = found, number + 1
    return newest


def take_candidate(ctx: RunContext, version: int) -> None:
    """Make this process's engine use the newest candidate of ``version``, where the version is not committed yet."""
    if ctx.ledger.head() >= version or (found := newest_candidate(ctx, version)) is None:
        return
    if ctx.candidates.get(version) not in (None, found["weights"]):
        ctx.forget_generator()  # it holds an older try of this version
    ctx.candidates[version] = found["weights"]


def _read(ctx: RunContext, version: int, number: int) -> dict[str, Any] | None:
    try:
        return ctx.store.read_json(layout.candidate(ctx.run_id, version, number))
    except NotFound:
        return None

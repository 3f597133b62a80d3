"""Which versions a run evaluates, which entry of the ledger records each, and how far engines may go until it is there.

Invariants:
- The schedule is a function of the configuration alone, so a resumed run, or one in roles, records what another would.
- An evaluation has as long as the window lasts: that of version ``v`` is recorded by step ``v + S``, or before the next
  one is due, or by the last step. Only that step waits for it.
- No engine moves past a version whose evaluation is due and not there, since it could not go back: batches that need a
  newer version wait. The step that records the evaluation needs no such batch, so nothing waits in a circle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core.config import RunConfig
from forge_core.store import layout

if TYPE_CHECKING:
    from forge_core.runs.context import RunContext


def evaluation_due(config: RunConfig, version: int) -> bool:
    """Whether ``version`` is evaluated: the initial one, and every ``eval.interval``. The last version is evaluated as
    a candidate, before the last step commits."""
    due = version == 0 or (config.eval.interval > 0 and version % config.eval.interval == 0)
    return due and config.eval.prompts > 0


def recorded_by(config: RunConfig, version: int) -> int:
    """The training step whose entry records the evaluation of ``version``, and that waits for it before it commits."""
    ahead, interval = config.max_staleness, config.eval.interval
    return min(version + (min(ahead, interval - 1) if interval else ahead), config.steps - 1)


def evaluated_by(config: RunConfig, batch: int) -> list[int]:
    """The versions whose evaluation step ``batch`` waits for, and records: one, and in the last step the last too."""
    last = [batch + 1] if batch + 1 == config.steps and config.eval.prompts > 0 else []
    return [version for version in unrecorded(config, batch) if recorded_by(config, version) == batch] + last


def unrecorded(config: RunConfig, head: int) -> list[int]:
    """The versions up to the newest (``head``) whose evaluation is due and that no entry records yet."""
    open_ = range(max(0, head - config.max_staleness), head + 1)
    return [v for v in open_ if evaluation_due(config, v) and recorded_by(config, v) >= head]


def first_unevaluated(ctx: RunContext, head: int) -> int | None:
    """The version that no engine may move past; None: there is none."""
    for version in unrecorded(ctx.config, head):
        if version not in ctx.evaluated:
            prefix = layout.evaluation(ctx.run_id, version, ctx.weights_content(version))
            if not ctx.store.published(prefix):
                return version
            ctx.evaluated.add(version)
    return None

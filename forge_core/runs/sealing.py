"""Before a run's configuration changes: a checkpoint of what it was.

Invariant: replay never crosses a change. The committed steps are replayed under the settings they were taken with, the
state is saved, and only then is the change recorded; a crash in between leaves a checkpoint that harms nobody.
"""

from __future__ import annotations

from dataclasses import replace

from forge_core.config import ConfigError
from forge_core.runs.context import RunContext
from forge_core.runs.formats import SFT
from forge_core.runs.record import RunRecord
from forge_core.runs.trainer_session import DriftError, newest_checkpoint
from forge_core.stop import StopToken
from forge_core.store import Store, layout


def seal(store: Store, record: RunRecord, stop: StopToken) -> None:
    """Make sure that the newest committed step of a run has a checkpoint, with the settings it has now."""
    ctx = _opened(store, replace(record, code_checked=True), stop)  # by the resume that changes it
    head = ctx.ledger.head()
    if head < 1:
        return
    entry = ctx.ledger.entry(head - 1)
    assert entry is not None
    if newest_checkpoint(ctx, head) == (head - 1, layout.checkpoint(ctx.run_id, head - 1, entry["attempt"])):
        return  # without loading anything: this machine may lack what the old settings need, such as GPUs
    try:
        ctx.trainer.prepare(head)
        ctx.trainer.checkpoint(entry)
    except DriftError as error:
        raise ConfigError(
            f"the changed code does not give the numbers of run {record.run_id!r} again, and its newest step "
            f"({head - 1}) has no checkpoint yet: resume with the old code until one is due (checkpoint.interval), "
            f"then change it. {error}"
        ) from error
    except BaseException:
        stop.set("interrupted")  # so that the replay ends, and with it the wait of close()
        raise
    finally:
        ctx.close()


def _opened(store: Store, record: RunRecord, stop: StopToken) -> RunContext:
    if record.flow != SFT:
        return RunContext(store, record, stop)
    from forge_core.runs.sft_context import SftContext

    return SftContext(store, record, stop)

"""Whether anyone works on a run, from the signs of life in its store. Light: looking at runs imports no engine.

Invariants:
- Ages are on the store's own clock, so the first look from any machine says as much as the hundredth.
- It is a hint for people: nothing that a run guarantees rests on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge_core.config.sft_config import SftConfig
from forge_core.runs.early_end import is_finished
from forge_core.runs.record import RunRecord
from forge_core.store import Ledger, NotFound, Store, layout

LEAST_S, MISSED = 45.0, 3.0  # a process is silent after so long, and after so many beats that did not come
EVERY_S = 20.0  # of processes of releases that did not say how often they give a sign

FINISHED, WORKING, CREATED, IDLE = "finished", "working", "created", "idle"
FAILED, STOPPED, KILLED = "failed", "stopped", "killed"


@dataclass(frozen=True)
class Worker:
    """A process that works on a run, or did; its newest sign of life was written ``silent_s`` ago. ``failed``: it ended
    with an error."""

    role: str
    name: str
    host: str
    doing: str
    made: int
    ended: bool
    failed: bool
    every_s: float
    silent_s: float

    @property
    def silent(self) -> bool:
        """Whether it has missed signs that a living process would have given."""
        return not self.ended and self.silent_s > max(LEAST_S, MISSED * self.every_s)

    @property
    def alive(self) -> bool:
        return not self.ended and not self.silent


def workers(store: Store, run_id: str) -> list[Worker]:
    """The processes of the run that have given a sign of life, those that have ended last. Raises StoreError."""
    keys = store.list(f"{layout.run(run_id)}workers")
    now = store.now() if keys else 0.0
    found = [worker for key in keys if (worker := _worker(store, key, now)) is not None]
    return sorted(found, key=lambda worker: (worker.ended, worker.role, worker.name))


def _worker(store: Store, key: str, now: float) -> Worker | None:
    try:
        silent_s, beat = max(0.0, now - store.written_at(key)), store.read_json(key)
    except NotFound:  # deleted since it was listed
        return None
    told = {name: beat[name] for name in ("role", "name", "host", "doing", "made", "ended")}
    return Worker(**told, failed=beat.get("failed", False), every_s=beat.get("every_s", EVERY_S), silent_s=silent_s)


def state_of(found: Sequence[Worker], *, finished: bool, begun: bool) -> str:
    """In a word: ``finished``; ``working``, where a process gives signs of life; else how the one ended that was there
    last: ``failed``, ``stopped`` when it was asked to, ``killed`` without a word. Where none is known: ``created``, or
    ``idle`` once the run has ``begun``."""
    if finished:
        return FINISHED
    if any(worker.alive for worker in found):
        return WORKING
    if not found:
        return IDLE if begun else CREATED
    last = min(found, key=lambda worker: worker.silent_s)
    return FAILED if last.failed else STOPPED if last.ended else KILLED


def run_state(store: Store, record: RunRecord, done: int) -> str:
    """The state of a run, of which ``done`` batches are finished, in a word. Raises StoreError."""
    supervised = isinstance(record.config, SftConfig)  # may end early
    if done >= record.config.steps or (supervised and is_finished(store, record)):
        return FINISHED
    begun = done > 0 or Ledger(store, record.run_id).head() >= 0
    return state_of(workers(store, record.run_id), finished=False, begun=begun)

"""Why a process that worked on a run ended: in the store, so that it can be read from any machine.

Invariants:
- A failure is told once, under a name of its own; nothing of a run rests on it.
- A store that cannot be written to hides no error: the process ends with the one that it has.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from forge_core.redaction import redact
from forge_core.runs.record import now
from forge_core.store import Store, StoreError, layout

log = logging.getLogger("forge")
LONGEST = 4000  # characters of a message


@dataclass(frozen=True)
class Failure:
    """``at``: ISO 8601, on the clock of ``host``."""

    role: str
    error: str
    at: str
    host: str


def record_failure(store: Store, run_id: str, role: str, error: BaseException) -> None:
    """Tell the store that a process of ``role`` ends with ``error``; secrets of its environment are left out."""
    text = redact(f"{type(error).__name__}: {error}")[:LONGEST]
    body = {"role": role, "error": text, "at": now(), "host": os.uname().nodename, "pid": os.getpid()}
    try:
        store.put_new_json(layout.failure(run_id, uuid.uuid4().hex[:12]), body)
    except (StoreError, OSError) as outage:
        log.debug("a failure is not in the store: %s", outage)


def failures(store: Store, keys: Iterable[str]) -> list[Failure]:
    """Those among ``keys`` of a run, the newest last. Raises StoreError."""
    bodies = [store.read_json(key) for key in keys if "/control/failure-" in key]
    found = [Failure(body["role"], body["error"], body["at"], body["host"]) for body in bodies]
    return sorted(found, key=lambda failure: failure.at)

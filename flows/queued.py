"""What Prefect has yet to send from this process when it ends: events, such as the states of tasks, and logs.

Prefect waits at the end until everything is sent and, when the server is gone, tries each message for seconds: hours
after a run of some length. Here all of it has ``LIMIT_S`` seconds, and the rest is dropped: what a run did is in the
store.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Any

LIMIT_S = 20.0
SERVICES = {"prefect.events.worker": "EventsWorker", "prefect.logging.handlers": "APILogWorker"}


def limit_at_exit() -> None:
    """Call this late: the last one registered is the first one called, and Prefect's own waiting comes after it."""
    threading._register_atexit(send_or_drop)  # type: ignore[attr-defined]  # as Prefect does: threads still work then


def send_or_drop(limit_s: float = LIMIT_S) -> None:
    """Send what is queued, as far as that takes ``limit_s`` seconds at most. Nothing can be sent afterwards."""
    deadline = time.monotonic() + limit_s
    services = [getattr(sys.modules[module], name) for module, name in SERVICES.items() if module in sys.modules]
    for service in services:
        instances = list(service._instances.values())
        service.drain_all(timeout=max(0.0, deadline - time.monotonic()))
        for instance in instances:
            _drop(instance._queue)


def _drop(waiting: queue.Queue[Any]) -> None:
    with suppress(queue.Empty):
        while True:
            waiting.get_nowait()
    waiting.put_nowait(None)  # the end, for whoever takes from it

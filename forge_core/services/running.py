"""An actor at work: one object, on threads of its own.

Guarantees:
- Methods that are plain functions run one at a time, in the order of the calls: an actor needs no lock.
- Coroutine methods run side by side on one event loop, which plain methods do not hold up.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from forge_core.services.errors import raisable


class Running:
    """Makes ``actor_class(*arguments, **keywords)`` as rank ``rank`` of ``size``, with ``rank`` and ``size`` set before
    ``__init__`` runs, and takes calls."""

    def __init__(
        self, actor_class: type, rank: int, size: int, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._plain = ThreadPoolExecutor(1, thread_name_prefix=actor_class.__name__)
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{actor_class.__name__}-loop", daemon=True)
        self._thread.start()
        try:
            self._actor = self._plain.submit(_make, actor_class, rank, size, arguments, keywords).result()
        except BaseException:
            self.stop()
            raise

    def call(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Future[Any]:
        """Start ``method``. The future has its value, or what it raised."""
        bound = getattr(self._actor, method)
        if inspect.iscoroutinefunction(bound):
            return asyncio.run_coroutine_threadsafe(_without_exit(bound(*arguments, **keywords)), self._loop)
        return self._plain.submit(bound, *arguments, **keywords)

    def stop(self) -> None:
        """Take no more calls; those that wait are cancelled, those at work run on."""
        self._plain.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _without_exit(work: Coroutine[Any, Any, Any]) -> Any:
    """``work``, whose SystemExit or KeyboardInterrupt does not end the event loop that others need."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise raisable(error) from error


def _make(actor_class: type, rank: int, size: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    actor: Any = object.__new__(actor_class)
    actor.rank, actor.size = rank, size
    actor.__init__(*arguments, **keywords)
    return actor

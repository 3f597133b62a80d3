"""One replica of a service: its actor, the requests at work on it, and its way back after a death.

Guarantees:
- At most ``replica_max_concurrent_requests`` are at work; the others wait their turn, and are turned away with
  ``ActorDied`` as soon as the actor is dead.
- A dead actor is started again under the same name, with growing pauses, a bounded number of times in a row.
- What an actor raises does not make it unhealthy: it is the caller's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from forge_core.services.config import ServiceConfig
from forge_core.services.errors import ActorDied
from forge_core.services.mesh import MadeWith, Mesh
from forge_core.services.metrics import ReplicaMetrics, ReplicaSummary

LONGEST_PAUSE_S = 60.0
log = logging.getLogger(__name__)


class State(Enum):
    STARTING = "STARTING"
    HEALTHY = "HEALTHY"
    RECOVERING = "RECOVERING"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


class Replica:
    """``changed`` is called on the event loop whenever ``state`` has changed."""

    def __init__(
        self,
        idx: int,
        actor_class: type,
        name: str,
        config: ServiceConfig,
        made_with: MadeWith,
        changed: Callable[[], None],
    ) -> None:
        self.idx, self.name, self.state = idx, f"{name}_{idx}", State.STARTING
        self.restarts = self._failures = self._active = self._waiting = 0
        self.metrics = ReplicaMetrics()
        self._making = (actor_class, self.name, config, made_with)
        self._config, self._changed = config, changed
        self._slots = asyncio.Semaphore(config.replica_max_concurrent_requests)
        self._loop = asyncio.get_running_loop()
        self._mesh: Mesh | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._pinged = 0.0

    @property
    def healthy(self) -> bool:
        return self.state is State.HEALTHY

    @property
    def load(self) -> int:
        return self._active + self._waiting

    async def start(self) -> None:
        """Raises what the actor raises while it is made and set up."""
        mesh = Mesh(*self._making, on_death=lambda reason: self._died(mesh, reason))
        self._mesh = mesh
        await mesh.start()
        self._become(State.HEALTHY)

    async def request(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The value of rank 0, or those of all ranks (``return_first_rank_result=False``)."""
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._active += 1
        try:
            return await self._request(method, arguments, keywords)
        finally:
            self._active -= 1
            self._slots.release()

    def check(self) -> None:
        """Send a ping, or count the actor as dead when the last one has been out for too long."""
        if not self.healthy:
            return
        if self._pinging is None or self._pinging.done():
            self._pinged, self._pinging = time.monotonic(), asyncio.create_task(self._ping())
        elif time.monotonic() > self._pinged + self._config.health_timeout_s:
            self._pinging.cancel()
            self._died(self._mesh, f"{self.name} answered no ping for {self._config.health_timeout_s:g} s")

    async def stop(self) -> None:
        self._become(State.STOPPED)
        for task in (self._recovery, self._pinging):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        if self._mesh is not None:
            await self._mesh.stop()

    def summary(self, sessions: int) -> ReplicaSummary:
        return ReplicaSummary(
            total_requests=self.metrics.total_requests,
            successful_requests=self.metrics.successful_requests,
            failed_requests=self.metrics.failed_requests,
            request_rate=self.metrics.request_rate(),
            avg_latency=self.metrics.avg_latency(),
            active_requests=self._active,
            queue_depth=self._waiting,
            assigned_sessions=sessions,
            capacity_utilization=self._active / self._config.replica_max_concurrent_requests,
            restarts=self.restarts,
            state=self.state.value,
        )

    async def _request(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not self.healthy or self._mesh is None:
            raise ActorDied(f"{self.name} is {self.state.value}")
        start = self.metrics.begin()
        try:
            values = await self._mesh.call(method, arguments, keywords)
        except BaseException:
            self.metrics.end(start, ok=False)
            raise
        self.metrics.end(start, ok=True)
        self._failures = 0
        return values[0] if self._config.return_first_rank_result else values

    async def _ping(self) -> None:
        if self._mesh is not None:
            try:
                await self._mesh.ping()
            except ActorDied as error:
                self._died(self._mesh, str(error))

    def _died(self, mesh: Mesh | None, reason: str) -> None:
        """From any thread."""
        if mesh is self._mesh and self.state is State.HEALTHY:
            self.state = State.RECOVERING  # at once: requests that fail now look at it
            log.warning("%s; it is started again", reason)
            self._loop.call_soon_threadsafe(self._begin_recovery)

    def _begin_recovery(self) -> None:
        if self.state is State.RECOVERING:
            self._changed()
            self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        if self._mesh is not None:
            await self._mesh.stop()
        while self._failures < self._config.max_restarts:
            await asyncio.sleep(min(self._config.restart_backoff_s * 2**self._failures, LONGEST_PAUSE_S))
            self._failures += 1
            try:
                await self.start()
            except Exception as error:  # whatever the actor raises: there is a next time, or an end
                log.warning("%s could not be started again: %s: %s", self.name, type(error).__name__, error)
                continue
            self.restarts += 1
            return
        log.error("%s died %d times in a row without doing a request: it stays away", self.name, self._failures + 1)
        self._become(State.FAILED)

    def _become(self, state: State) -> None:
        if self.state is not State.STOPPED:
            self.state = state
            self._changed()

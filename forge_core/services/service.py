"""A service: replicas of an actor behind one name.

Guarantees:
- A request goes to a healthy replica. When its replica dies it is tried elsewhere, a bounded number of times; what the
  actor raised is raised to the caller and never tried again.
- Requests of a session go to one replica; when that dies the session moves.
- ``call_all`` reaches every replica or raises: none is left out silently. One that is being started again is waited
  for.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from forge_core.services.config import ServiceConfig
from forge_core.services.errors import ActorDied, ServiceUnavailable
from forge_core.services.mesh import MadeWith
from forge_core.services.metrics import ServiceMetrics, summarised
from forge_core.services.replica import Replica, State
from forge_core.services.routing import ROUTERS, LeastLoadedRouter, SessionRouter


class Service:
    def __init__(self, actor_class: type, name: str, config: ServiceConfig, made_with: MadeWith) -> None:
        self.name, self.config = name, config
        self._changed = asyncio.Event()
        self.replicas = [
            Replica(idx, actor_class, name, config, made_with, self._note_change) for idx in range(config.num_replicas)
        ]
        self._stateless, self._sticky = ROUTERS[config.routing](), SessionRouter(LeastLoadedRouter())
        self._sessions: set[str] = set()
        self._assigned: dict[str, int] = {}
        self._health: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start all replicas. Raises what the first that fails raises; none runs then."""
        try:
            await asyncio.gather(*(replica.start() for replica in self.replicas))
        except BaseException:
            await self.stop()
            raise
        self._health = asyncio.create_task(self._watch_health())

    async def stop(self) -> None:
        """End all replicas; requests at work raise ActorDied. Idempotent."""
        if self._health is not None:
            self._health.cancel()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    async def call(
        self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any], session: str | None = None
    ) -> Any:
        """One request. Raises what the actor raises, ActorDied after the last try, ServiceUnavailable."""
        for tries_left in range(self.config.max_retries, -1, -1):
            replica = await self._choose(session)
            try:
                return await replica.request(method, arguments, keywords)
            except ActorDied:
                if replica.healthy or not tries_left:  # healthy: the actor itself raised it
                    raise
        raise AssertionError("unreachable")

    async def call_all(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """One request to every replica; values in their order. Raises the first error, when all have answered."""

        async def one(replica: Replica) -> Any:
            await self._until(lambda: replica.healthy, [replica])
            return await replica.request(method, arguments, keywords)

        found = await asyncio.gather(*map(one, self.replicas), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                raise error
        return found

    async def start_session(self) -> str:
        """The id of a new session; its replica is chosen at its first request."""
        self._sessions.add(session := str(uuid.uuid4()))
        return session

    async def terminate_session(self, session: str) -> None:
        """Forget a session. Ids that are not known are ignored."""
        self._sessions.discard(session)
        self._assigned.pop(session, None)

    def get_metrics(self) -> ServiceMetrics:
        assigned = Counter(self._assigned.values())
        return summarised(
            len(self._sessions), {replica.idx: replica.summary(assigned[replica.idx]) for replica in self.replicas}
        )

    def get_metrics_summary(self) -> dict[str, dict[Any, Any]]:
        """``{"service": {...}, "replicas": {0: {...}}}``."""
        return self.get_metrics().summary()

    async def _choose(self, session: str | None) -> Replica:
        await self._until(lambda: any(replica.healthy for replica in self.replicas), self.replicas)
        healthy = [replica for replica in self.replicas if replica.healthy]
        if session is None:
            return self._stateless.choose(healthy)
        if self._assigned.get(session) not in {replica.idx for replica in healthy}:
            held = Counter(self._assigned.values())
            healthy.sort(key=lambda replica: held[replica.idx])  # idle sessions are no load: the one with the fewest
        return self._sticky.choose(healthy, session, self._assigned)

    async def _until(self, true: Callable[[], bool], replicas: list[Replica]) -> None:
        """Wait until ``true``, which may take the restart of one of ``replicas``. Raises ServiceUnavailable when none
        of them comes back."""
        deadline = asyncio.get_running_loop().time() + self.config.start_timeout_s
        while not true():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or all(replica.state in (State.FAILED, State.STOPPED) for replica in replicas):
                states = ", ".join(f"{replica.name} is {replica.state.value}" for replica in replicas)
                raise ServiceUnavailable(f"{self.name}: no replica can take the request: {states}")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def _note_change(self) -> None:
        self._changed.set()

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_poll_rate)
            for replica in self.replicas:
                replica.check()

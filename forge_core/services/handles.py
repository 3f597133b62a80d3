"""What callers hold: an actor's methods, or a service's, with the verbs that each has."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any, NoReturn

from forge_core.services.mesh import Mesh
from forge_core.services.metrics import ServiceMetrics
from forge_core.services.service import Service

Methods = frozenset[str]


class ActorEndpoint:
    """A method of an actor: ``call_one`` (of its only rank), ``call`` (of all ranks), ``choose`` (of any one)."""

    def __init__(self, mesh: Mesh, method: str) -> None:
        self._mesh, self._method = mesh, method

    async def call_one(self, *arguments: Any, **keywords: Any) -> Any:
        """The value of the only rank. Raises ValueError where there are several, and what the method raises."""
        if self._mesh.size != 1:
            raise ValueError(f"{self._method}.call_one: the actor has {self._mesh.size} ranks: use call or choose")
        return await self._mesh.call_rank(0, self._method, arguments, keywords)

    async def call(self, *arguments: Any, **keywords: Any) -> list[Any]:
        """The values of all ranks, in their order. Raises what one of them raised."""
        return await self._mesh.call(self._method, arguments, keywords)

    async def choose(self, *arguments: Any, **keywords: Any) -> Any:
        """The value of any one rank."""
        return await self._mesh.call_rank(random.randrange(self._mesh.size), self._method, arguments, keywords)

    def route(self, *arguments: Any, **keywords: Any) -> NoReturn:
        _wrong("route", "an actor", "call_one, call or choose")

    def fanout(self, *arguments: Any, **keywords: Any) -> NoReturn:
        _wrong("fanout", "an actor", "call_one, call or choose")


class ActorHandle:
    """One attribute for each public method of the actor's class."""

    def __init__(self, mesh: Mesh, methods: Methods) -> None:
        self._mesh, self._methods = mesh, methods

    def __getattr__(self, name: str) -> ActorEndpoint:
        _known(name, self._methods)
        return ActorEndpoint(self._mesh, name)


class ServiceEndpoint:
    """A method of a service: ``route`` (one replica) and ``fanout`` (every replica)."""

    def __init__(self, service: Service, method: str, session: Callable[[], str | None]) -> None:
        self._service, self._method, self._session = service, method, session

    async def route(self, *arguments: Any, sess_id: str | None = None, **keywords: Any) -> Any:
        """``sess_id``: the session; left out: that of the ``session()`` block around the call, if any."""
        return await self._service.call(self._method, arguments, keywords, sess_id or self._session())

    async def fanout(self, *arguments: Any, **keywords: Any) -> list[Any]:
        """The values of every replica, in their order; waits for one that is being started again."""
        return await self._service.call_all(self._method, *arguments, **keywords)

    def call_one(self, *arguments: Any, **keywords: Any) -> NoReturn:
        _wrong("call_one", "a service", "route")

    def choose(self, *arguments: Any, **keywords: Any) -> NoReturn:
        _wrong("choose", "a service", "route")

    def call(self, *arguments: Any, **keywords: Any) -> NoReturn:
        _wrong("call", "a service", "fanout")

    def broadcast(self, *arguments: Any, **keywords: Any) -> NoReturn:
        _wrong("broadcast", "a service", "fanout")


class ServiceInterface:
    """One attribute for each public method of the actor's class, and the service's own verbs."""

    def __init__(self, service: Service, methods: Methods) -> None:
        self._service, self._methods = service, methods
        self._session: ContextVar[str | None] = ContextVar(f"session of {service.name}", default=None)

    def __getattr__(self, name: str) -> ServiceEndpoint:
        _known(name, self._methods)
        return ServiceEndpoint(self._service, name, self._session.get)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[str]:
        """Within the block, this task's requests go to one replica."""
        session = await self.start_session()
        token = self._session.set(session)
        try:
            yield session
        finally:
            self._session.reset(token)
            await self.terminate_session(session)

    async def start_session(self) -> str:
        """The id of a new session, for ``route(sess_id=...)``."""
        return await self._service.start_session()

    async def terminate_session(self, session: str) -> None:
        """Forget a session; its replica takes others."""
        await self._service.terminate_session(session)

    async def call_all(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """As ``<method>.fanout``."""
        return await self._service.call_all(method, *arguments, **keywords)

    def get_metrics(self) -> ServiceMetrics:
        """Counts, rates (1/s), latencies (seconds) and queues of the service and its replicas, as objects."""
        return self._service.get_metrics()

    def get_metrics_summary(self) -> dict[str, dict[Any, Any]]:
        """The same as numbers: ``{"service": {...}, "replicas": {0: {...}}}``."""
        return self._service.get_metrics_summary()

    async def shutdown(self) -> None:
        """End all replicas. Idempotent."""
        await self._service.stop()


def _known(name: str, methods: Methods) -> None:
    if name not in methods:
        raise AttributeError(f"no public method {name!r}; there are {', '.join(sorted(methods))}")


def _wrong(verb: str, what: str, right: str) -> NoReturn:
    raise NotImplementedError(f"You tried to use {verb} on {what}: use {right}")

"""Which replica a request goes to. A router chooses among healthy replicas, of which there is at least one."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A replica, as a router sees it."""

    @property
    def idx(self) -> int:
        """Its number, from 0."""
        ...

    @property
    def load(self) -> int:
        """Requests at work and waiting."""
        ...


Chosen = TypeVar("Chosen", bound=Candidate)


class Router(Protocol):
    """Chooses the replica of a request."""

    def choose(self, healthy: Sequence[Chosen]) -> Chosen:
        """One of ``healthy``, which is never empty; sorted by ``idx``, or for a new session by how many each holds."""
        ...


class RoundRobinRouter:
    """Replicas in turn, whichever are healthy at the time."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, healthy: Sequence[Chosen]) -> Chosen:
        found = next((replica for replica in healthy if replica.idx > self._last), healthy[0])
        self._last = found.idx
        return found


class LeastLoadedRouter:
    """The replica with the fewest requests; the first of several."""

    def choose(self, healthy: Sequence[Chosen]) -> Chosen:
        return min(healthy, key=lambda replica: replica.load)


class SessionRouter:
    """Requests of a session go to one replica for as long as that is healthy; ``fallback`` chooses it."""

    def __init__(self, fallback: Router) -> None:
        self._fallback = fallback

    def choose(self, healthy: Sequence[Chosen], session: str, assigned: MutableMapping[str, int]) -> Chosen:
        """``assigned``: the replica of each session; changed when this one has none that is healthy."""
        for replica in healthy:
            if assigned.get(session) == replica.idx:
                return replica
        found = self._fallback.choose(healthy)
        assigned[session] = found.idx
        return found


ROUTERS: dict[str, type[RoundRobinRouter] | type[LeastLoadedRouter]] = {
    "round_robin": RoundRobinRouter,
    "least_loaded": LeastLoadedRouter,
}

"""What an actor class asks for, and how a service of it behaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ServiceConfig:
    """``procs`` processes a replica (``threads``: on threads of this process instead); times are in seconds.

    A replica that dies is started again after ``restart_backoff_s``, twice as long each time, until it has done a
    request; after ``max_restarts`` starts in a row without one it stays away. A request whose replica died is tried
    on another ``max_retries`` times. A replica that answers no ping for ``health_timeout_s`` counts as dead: choose
    more than the longest call into C that holds Python's lock.
    """

    procs: int = 1
    num_replicas: int = 1
    with_gpus: bool = False
    hosts: int | None = None
    mesh_name: str | None = None
    health_poll_rate: float = 0.2
    replica_max_concurrent_requests: int = 10
    return_first_rank_result: bool = True
    routing: Literal["round_robin", "least_loaded"] = "round_robin"
    threads: bool = False
    max_retries: int = 2
    restart_backoff_s: float = 0.5
    max_restarts: int = 5
    health_timeout_s: float = 30.0
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("procs", "num_replicas", "replica_max_concurrent_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1")
        if self.hosts is not None:
            raise ValueError(
                f"hosts is {self.hosts}: actors run on this machine; several machines share a run through work pools "
                "(docs/roles.md)"
            )
        if self.routing not in ("round_robin", "least_loaded"):
            raise ValueError(f"routing is {self.routing!r}: use round_robin or least_loaded")
        if self.threads and (self.with_gpus or self.procs > 1):
            raise ValueError(
                "threads: an actor on threads has no GPUs and no processes of its own: leave one of them out"
            )

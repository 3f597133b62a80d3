"""What a service counts, under the names that its users know."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

KEPT = 100  # requests whose times are kept
WINDOW_S = 60.0
LATENCIES = 50


@dataclass
class ReplicaMetrics:
    total_requests: int = 0
    successful_requests: int = 0
    failed_requests: int = 0
    _starts: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def begin(self) -> float:
        """Count a request; its start, for ``end``."""
        self.total_requests += 1
        self._starts.append(time.monotonic())
        return self._starts[-1]

    def end(self, start: float, ok: bool) -> None:
        self._latencies.append(time.monotonic() - start)
        self.successful_requests += ok
        self.failed_requests += not ok

    def request_rate(self) -> float:
        """Requests per second over the last minute."""
        recent = time.monotonic() - WINDOW_S
        return sum(start >= recent for start in self._starts) / WINDOW_S

    def avg_latency(self) -> float:
        """Seconds, over the last 50 requests; 0 before the first."""
        latest = list(self._latencies)[-LATENCIES:]
        return sum(latest) / len(latest) if latest else 0.0


@dataclass(frozen=True)
class ReplicaSummary:
    total_requests: int
    successful_requests: int
    failed_requests: int
    request_rate: float
    avg_latency: float
    active_requests: int
    queue_depth: int
    assigned_sessions: int
    capacity_utilization: float
    restarts: int
    state: str


@dataclass(frozen=True)
class ServiceSummary:
    total_sessions: int
    healthy_replicas: int
    total_replicas: int
    total_request_rate: float
    avg_queue_depth: float
    avg_capacity_utilization: float
    sessions_per_replica: float


@dataclass(frozen=True)
class ServiceMetrics:
    service: ServiceSummary
    replicas: dict[int, ReplicaSummary]

    def summary(self) -> dict[str, dict[Any, Any]]:
        """Plain dictionaries: ``{"service": {...}, "replicas": {0: {...}}}``."""
        return {"service": vars(self.service), "replicas": {i: vars(replica) for i, replica in self.replicas.items()}}


def summarised(sessions: int, replicas: dict[int, ReplicaSummary]) -> ServiceMetrics:
    """Averages are over healthy replicas."""
    healthy = [replica for replica in replicas.values() if replica.state == "HEALTHY"]
    count = max(len(healthy), 1)
    return ServiceMetrics(
        ServiceSummary(
            total_sessions=sessions,
            healthy_replicas=len(healthy),
            total_replicas=len(replicas),
            total_request_rate=sum(replica.request_rate for replica in replicas.values()),
            avg_queue_depth=sum(replica.queue_depth for replica in healthy) / count,
            avg_capacity_utilization=sum(replica.capacity_utilization for replica in healthy) / count,
            sessions_per_replica=sessions / len(replicas) if replicas else 0.0,
        ),
        replicas,
    )

"""Slots of an engine that its users do not get: a probe never waits for one of their responses to end.

Invariants:
- The engine's core process, which makes the scheduler and holds the GPU, does not outlive whoever started it: not even
  when ``kill -9`` takes all the processes of Forge at once, the guard (``forge_core.processes``) among them. (With a
  scheduler of the user's own the guard alone sees to it.)
- Users' requests run in at most ``max_num_seqs`` slots, as without this; the ``RESERVED`` slots beyond are for requests
  of ``PROBE_PRIORITY`` alone.
- A scheduler of the user's own (``generator.engine_args.scheduler_cls``) is left as it is; a probe may wait there.

vLLM admits a waiting request while fewer than a limit run. The schedulers below raise that limit by the probes there
are, which are first in the queue.
"""

from __future__ import annotations

from typing import Any

from forge_core.models.probe import SEQUENCES
from forge_core.processes.parent import die_with_parent

PROBE_PRIORITY = -(2**31)
RESERVED = SEQUENCES


def reserve_slots(scheduler_config: Any) -> None:
    """Change vLLM's resolved configuration before the engine is made."""
    if scheduler_config.scheduler_cls is not None:
        return
    name = "AsyncProbeScheduler" if scheduler_config.async_scheduling else "ProbeScheduler"
    scheduler_config.scheduler_cls = f"forge_core.generation.vllm_schedulers.{name}"
    scheduler_config.max_num_seqs += RESERVED


class ProbeSlots:
    """What is added to a scheduler of vLLM (``vllm_schedulers.py``)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        die_with_parent()
        super().__init__(*args, **kwargs)
        # vLLM 0.25 has one limit; newer ones admit by another than the number of slots.
        self._limit = "max_num_active_reqs" if hasattr(self, "max_num_active_reqs") else "max_num_running_reqs"
        slots = self.scheduler_config.max_num_seqs - RESERVED  # type: ignore[attr-defined]
        self._users = min(getattr(self, self._limit), slots)
        self._probes: set[str] = set()

    def add_request(self, request: Any) -> None:
        if request.priority == PROBE_PRIORITY:
            self._probes.add(request.request_id)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._probes &= self.requests.keys()  # type: ignore[attr-defined]
        limit = self._users + min(len(self._probes), RESERVED)
        setattr(self, self._limit, max(limit, len(self.running)))  # type: ignore[attr-defined]
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

"""vLLM's schedulers with slots for probes (see ``vllm_slots.py``); the engine's core process imports this by name."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from forge_core.generation.vllm_slots import ProbeSlots


class ProbeScheduler(ProbeSlots, Scheduler):  # type: ignore[misc]
    pass


class AsyncProbeScheduler(ProbeSlots, AsyncScheduler):  # type: ignore[misc]
    pass

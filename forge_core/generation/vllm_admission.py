"""Which of an engine's requests vLLM has already been given.

A swap of weights takes back every request that vLLM has but has not begun, and gives it anew for the new version; with
hundreds of short requests that would cost more than the swap itself. So vLLM is given no more than it can begin soon,
and the others wait here, where a swap costs them nothing.

Invariants:
- Lower priorities enter first, then those that came first. A request never waits here for one of a higher priority:
  only requests of its own or a lower one count against ``AHEAD``.
- Nothing enters while the gate is closed.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from forge_core.generation.vllm_open import Open

AHEAD = 128  # requests without a token that vLLM has: more than it begins in the milliseconds until the next look
LOOK_S = 0.002


class Admission:
    """``gate``: closed (not set) while weights are swapped. ``begun``: whether vLLM has sampled a token of a request.
    ``start`` runs a coroutine beside the others and sees to its error. To be used in one event loop."""

    def __init__(
        self, gate: asyncio.Event, begun: Callable[[Open], bool], start: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._gate, self._begun, self._start = gate, begun, start
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, Open, asyncio.Future[None]]] = []
        self._fresh: dict[int, deque[Open]] = {}  # by priority: those without a token that vLLM has or is about to get
        self._looking = False

    async def enter(self, item: Open) -> None:
        """Wait until vLLM may be given ``item``, or until it is aborted. ``left`` must follow."""
        if item.arrival is None:
            item.arrival = next(self._arrivals)
        entered = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (item.request["priority"], item.arrival, item, entered))
        if not self._looking:
            self._looking = True
            self._start(self._look())
        await entered

    def left(self, item: Open) -> None:
        """vLLM works on ``item`` no more."""
        fresh = self._fresh.get(item.request["priority"], deque())
        if item in fresh:
            fresh.remove(item)

    def aborted(self) -> None:
        """Some requests have been aborted: those of them that wait here wait no longer."""
        for _, _, item, entered in self._waiting:
            if item.aborted and not entered.done():
                entered.set_result(None)
        self._waiting = [entry for entry in self._waiting if not entry[2].aborted]
        heapq.heapify(self._waiting)

    def _admit(self) -> None:
        if not self._gate.is_set():
            return
        self._forget_begun()
        while self._waiting:
            priority, _, item, entered = self._waiting[0]
            if sum(len(fresh) for other, fresh in self._fresh.items() if other <= priority) >= AHEAD:
                return
            heapq.heappop(self._waiting)
            self._fresh.setdefault(priority, deque()).append(item)
            entered.set_result(None)

    def _forget_begun(self) -> None:
        """vLLM begins those of one priority in order, so the first that has not begun ends the look."""
        for fresh in self._fresh.values():
            while fresh and self._begun(fresh[0]):
                fresh.popleft()
        self._fresh = {priority: fresh for priority, fresh in self._fresh.items() if fresh}

    async def _look(self) -> None:
        while self._waiting:
            self._admit()
            await asyncio.sleep(LOOK_S)
        self._looking = False

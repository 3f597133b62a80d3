"""What vLLM is given of what waits: enough to be busy, older batches first, and nothing during a swap."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from forge_core.generation.vllm_admission import AHEAD, LOOK_S, Admission
from forge_core.generation.vllm_open import Open


class Given:
    """Requests in the order in which they came to vLLM; those in ``begun`` have a token."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.begun: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.admission = Admission(self.gate, lambda item: item.request["id"] in self.begun, self._start)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

    def give(self, *names: str, priority: int = 0) -> list[Open]:
        items = [Open({"id": name, "priority": priority}) for name in names]
        for item in items:
            self._start(self._enter(item))
        return items

    async def _enter(self, item: Open) -> None:
        await self.admission.enter(item)
        if not item.aborted:
            self.names.append(item.request["id"])


def played(play: Callable[[Given], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        await play(Given())

    asyncio.run(within())


async def later() -> None:
    await asyncio.sleep(10 * LOOK_S)


def names(kind: str, count: int) -> list[str]:
    return [f"{kind}{i}" for i in range(count)]


def test_no_more_enter_than_can_begin_soon_and_the_rest_as_they_begin() -> None:
    async def play(given: Given) -> None:
        wanted = names("r", 2 * AHEAD + 5)
        given.give(*wanted)
        await later()
        assert given.names == wanted[:AHEAD]
        given.begun |= set(wanted[:3])
        await later()
        assert given.names == wanted[: AHEAD + 3]
        given.begun |= set(wanted)
        await later()
        assert given.names == wanted

    played(play)


def test_an_older_batch_never_waits_for_a_younger_one() -> None:
    async def play(given: Given) -> None:
        young = names("young", AHEAD + 10)
        given.give(*young, priority=7)
        await later()
        given.give("old", priority=6)
        await later()
        assert given.names == [*young[:AHEAD], "old"]
        given.give("older", priority=5)
        await later()
        given.begun |= {"young0", "young1"}
        await later()
        assert given.names == [*young[:AHEAD], "old", "older"]  # which count for the younger ones

    played(play)


def test_what_is_taken_back_comes_before_what_arrived_after_it() -> None:
    async def play(given: Given) -> None:
        items = given.give(*names("r", AHEAD + 2))
        await later()
        given.gate.clear()
        for item in items[:2]:
            given.admission.left(item)
            given._start(given._enter(item))
        await later()
        assert len(given.names) == AHEAD  # nothing enters while weights are swapped
        given.gate.set()
        await later()
        assert given.names[AHEAD:] == ["r0", "r1"]

    played(play)


def test_what_is_aborted_waits_no_longer_and_takes_no_place() -> None:
    async def play(given: Given) -> None:
        items = given.give(*names("r", AHEAD + 3))
        await later()
        waiting = items[AHEAD]
        waiting.aborted = True
        given.admission.aborted()
        await later()
        given.admission.left(waiting)
        given.admission.left(items[0])
        await later()
        assert given.names == [*names("r", AHEAD), f"r{AHEAD + 1}"]

    played(play)

"""All ranks of one actor: started together, called together, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from forge_core.home import forge_home
from forge_core.overdue import Overdue
from forge_core.services.config import ServiceConfig
from forge_core.services.errors import ActorDied
from forge_core.services.gpus import THIS_MACHINE
from forge_core.services.ranks import ProcessRank, Rank, ThreadRank

MadeWith = tuple[tuple[Any, ...], dict[str, Any]]


class Mesh:
    """``on_death`` is called from any thread when a rank is gone; the others are then of no use."""

    def __init__(
        self, actor_class: type, name: str, config: ServiceConfig, made_with: MadeWith, on_death: Callable[[str], None]
    ) -> None:
        self._class, self._name, self._config, self._made_with = actor_class, name, config, made_with
        self._on_death = on_death
        self._ranks: list[Rank] = []
        self._starting: asyncio.Future[None] | None = None
        self._gpus: tuple[str, ...] = ()

    async def start(self) -> None:
        """Make every rank's actor and run its ``setup``. Raises what they raise; the mesh is stopped then."""
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                self._starting = asyncio.ensure_future(asyncio.to_thread(self._start_ranks))
                await asyncio.shield(self._starting)
                await asyncio.gather(*(asyncio.wrap_future(rank.ready) for rank in self._ranks))
                await self.call("setup", (), {})
        except TimeoutError:
            await self.stop()
            raise Overdue(f"{self._name} was not set up within {self._config.start_timeout_s:g} s") from None
        except BaseException:
            await self.stop()
            raise

    async def call(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        """The values of all ranks, in their order. Raises what one of them raised."""
        return await _all([rank.call(method, arguments, keywords) for rank in self._present()])

    async def call_rank(self, rank: int, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return await asyncio.wrap_future(self._present()[rank].call(method, arguments, keywords))

    async def ping(self) -> None:
        """Returns when every rank has answered."""
        await _all([rank.ping() for rank in self._present()])

    async def stop(self) -> None:
        """End all ranks, those too that are just being started, and give their GPUs back. Idempotent."""
        if self._starting is not None and not self._starting.done():
            await asyncio.wait([self._starting])  # a thread cannot be cancelled, and what it starts must not be left
        ranks, self._ranks = self._ranks, []
        await asyncio.gather(*(asyncio.to_thread(rank.stop) for rank in ranks))
        THIS_MACHINE.release(self._gpus)
        self._gpus = ()

    @property
    def size(self) -> int:
        return self._config.procs

    def _present(self) -> list[Rank]:
        if not self._ranks:
            raise ActorDied(f"{self._name} was stopped")
        return self._ranks

    def _start_ranks(self) -> None:
        if self._config.threads:
            self._ranks = [ThreadRank(self._class, self._name, 0, 1, self._made_with)]
            return
        if self._config.with_gpus:
            self._gpus = THIS_MACHINE.take(self._config.procs)
        shared = {**_devices(self._gpus), **_meeting_point(self.size)}
        for rank in range(self.size):
            name = self._name if self.size == 1 else f"{self._name}-{rank}"
            self._ranks.append(
                ProcessRank(
                    self._class,
                    name,
                    rank,
                    self.size,
                    self._made_with,
                    environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    log=forge_home() / "services" / f"{name}-{os.getpid()}.log",
                    on_death=self._on_death,
                )
            )


async def _all(futures: list[Future[Any]]) -> list[Any]:
    return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))


def _devices(gpus: tuple[str, ...]) -> dict[str, str]:
    from forge_core.devices import Placement

    return Placement.environment(gpus)


def _meeting_point(size: int) -> dict[str, str]:
    """What ``torch.distributed`` reads to bring the ranks together: on the loopback interface, a port of their own."""
    if size == 1:
        return {}
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}

"""The engines of one vLLM generator: started, moved to new weights together, started again when they die.

Invariants:
- ``version`` is served by every engine, or an update to a newer one has failed in part: then some are ahead of it, and
  none is behind.
- An engine that could not take new weights, or died, is started again on ``version``; one that dies more than
  ``MAX_RESTARTS`` times without having finished a request breaks the pool.
- Between ``sleep`` and ``wake`` no engine has or takes memory of its GPU; one that dies is started again after it.
- State is read and changed under ``changed``, which the owner shares; ``on_lost(index)`` is called under it when an
  engine is gone, and ``on_ready()`` when one has come back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forge_core.generation import engine_weights
from forge_core.generation.base import GenerationError, check_newer
from forge_core.generation.vllm_replica import Replica, ReplicaDied
from forge_core.generation.vllm_settings import VLLMSettings
from forge_core.models import probe
from forge_core.models.errors import WeightsError
from forge_core.stop import StopToken
from forge_core.temporary import temporary_folder

log = logging.getLogger("forge")
MAX_RESTARTS = 3


class EnginePool:
    """``weights(version)`` gives a verified model folder. ``stop`` ends engines that are being started."""

    def __init__(
        self,
        weights: Callable[[int], Path],
        version: int,
        settings: VLLMSettings,
        *,
        logs: Path,
        changed: threading.Condition,
        on_done: Callable[[dict[str, Any]], None],
        on_lost: Callable[[int], None],
        on_ready: Callable[[], None],
        stop: StopToken | None = None,
    ) -> None:
        self.weights, self.version, self.settings = weights, version, settings
        self.last_update: dict[str, float] = {}  # seconds of each phase of the newest update, in the slowest engine
        self.broken: BaseException | None = None
        self.closed = self.asleep = False
        self._logs, self._changed, self._stop = logs, changed, stop
        self._on_done, self._on_lost, self._on_ready = on_done, on_lost, on_ready
        self._updating = threading.Lock()
        self._restarts = [0] * len(settings.gpus)
        self._replicas: list[Replica | None] = [None] * len(settings.gpus)
        self._signature = engine_weights.signature(weights(version))

    def start(self) -> None:
        """Start all engines, side by side. Raises ReplicaDied; ``close`` then ends those that did start."""

        def start(index: int) -> None:
            self._replicas[index] = self._started(index)

        with ThreadPoolExecutor(len(self._replicas)) as pool:
            starts = [pool.submit(start, index) for index in range(len(self._replicas))]
        for started in starts:
            started.result()

    def live(self) -> dict[int, Replica]:
        """The engines that work now, by number."""
        return {index: r for index, r in enumerate(self._replicas) if r is not None and r.alive}

    def any(self) -> Replica:
        """An engine that works; waits for one that is being started again."""
        with self._changed:
            self._changed.wait_for(lambda: self.live() or self.broken or self.closed)
            self.check_usable()
            return next(iter(self.live().values()))

    def check_usable(self) -> None:
        if self.broken is not None:
            raise self.broken
        if self.closed:
            raise GenerationError("the generator was shut down")

    def succeeded(self, index: int) -> None:
        """Engine ``index`` has finished a request."""
        self._restarts[index] = 0

    def update(self, version: int) -> None:
        """Move every engine to ``version``. ValueError for an older one; WeightsError when the files do not fit or an
        engine could not take them: then the present version stays the one that is served. An engine that dies meanwhile
        for another reason is started again on ``version``."""
        self.any()  # before the lock: an engine that is being started again needs it
        with self._updating:
            if version == self.version:
                return
            check_newer(version, self.version)
            folder = self.weights(version)  # fetched and verified while the engines go on
            engine_weights.check_same(folder, self._signature)
            self.last_update = self._swap(version, folder)
            self.version = version

    def sleep(self) -> None:
        """Free the GPUs."""
        with self._updating:  # no engine is being started again
            self.asleep = True
            self._tell("sleep")

    def wake(self) -> None:
        """Take the memory back."""
        with self._updating:
            self._tell("wake")
        with self._changed:
            self.asleep = False
            self._changed.notify_all()

    def _tell(self, what: str) -> None:
        for replica in self.live().values():
            with suppress(ReplicaDied):  # then it has freed everything, and is started again
                replica.call(what)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            replicas = [r for r in self._replicas if r is not None]
            self._changed.notify_all()
        for replica in replicas:
            replica.close()

    def _started(self, index: int) -> Replica:
        """A new engine number ``index`` that serves the present version."""
        name, folder = f"vllm-{index}", self.weights(self.version)
        with self._loadable(folder) as loaded:
            start = {
                "engine_args": self.settings.arguments(index, loaded),
                "version": self.version,
                "dtype": self.settings.arithmetic,
                "probe": probe.read(folder),
            }
            replica = Replica(
                name,
                start,
                env=self.settings.variables(index),
                log=self._logs / f"{name}.log",
                on_done=self._on_done,
                on_death=lambda _, reason: self._on_death(index, reason),
            )
            replica.wait_ready(self._stop)
        return replica

    @contextmanager
    def _loadable(self, folder: Path) -> Iterator[Path]:
        """What vLLM loads: the folder, or on a CPU an untied view of it (see ``engine_weights``) while it loads."""
        if not self.settings.on_cpu or not engine_weights.is_tied(folder):
            yield folder
            return
        with temporary_folder("engine") as view:
            yield engine_weights.untied_view(folder, view / "model")

    def _swap(self, version: int, folder: Path) -> dict[str, float]:
        """Hand ``folder`` to every engine; seconds of each phase in the slowest one."""
        expected, replicas = probe.read(folder), list(self.live().values())

        def update(replica: Replica) -> dict[str, float] | ReplicaDied:
            try:
                return replica.update(version, handed, drain=self.settings.drain, probe=expected)
            except ReplicaDied as error:
                return error if replica.refused else {}

        with self._loadable(folder) as handed, ThreadPoolExecutor(len(self._replicas)) as pool:
            outcomes = list(pool.map(update, replicas))
        errors = [outcome for outcome in outcomes if isinstance(outcome, ReplicaDied)]
        if errors:
            raise WeightsError(
                f"{errors[0]}; version {self.version} keeps serving, and version {version} can be tried again"
            ) from errors[0]
        times = [outcome for outcome in outcomes if isinstance(outcome, dict)]
        return max(times, key=lambda t: sum(t.values()), default={})

    def _on_death(self, index: int, reason: str) -> None:
        """Called in the reader thread of a dead engine."""
        with self._changed:
            self._replicas[index] = None
            if self.closed:
                return
            self._restarts[index] += 1
            log.warning("vllm-%d died (%s); starting it again on version %d", index, reason, self.version)
            if self._restarts[index] > MAX_RESTARTS:
                self._break(f"vllm-{index} died {MAX_RESTARTS + 1} times in a row: {reason}")
                return
            self._on_lost(index)
        threading.Thread(target=self._restart, args=(index,), name=f"vllm-{index}-restart", daemon=True).start()

    def _restart(self, index: int) -> None:
        try:
            replica = self._started_again(index)
        except BaseException as error:  # whatever it is, those who wait for this engine must hear of it
            self._break(f"vllm-{index} cannot be started again: {error}")
            return
        if replica is None:
            return
        with self._changed:
            self._replicas[index] = replica
            if self.closed:
                replica.close()
            self._on_ready()
            self._changed.notify_all()

    def _started_again(self, index: int) -> Replica | None:
        """Engine number ``index`` once more, as soon as its GPU may be used; None after ``close``."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or not self.asleep)
                if self.closed:
                    return None
            with self._updating:  # an update sees every engine, or none of this one
                if not self.asleep:
                    return self._started(index)

    def _break(self, reason: str) -> None:
        with self._changed:
            self.broken = GenerationError(reason)
            self._changed.notify_all()

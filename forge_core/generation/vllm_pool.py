"""The engines of one vLLM generator: started, moved to new weights together, started again when they die.

Invariants:
- ``version`` is served by every engine, or an update to a newer one has failed in part: then some are ahead of it, and
  none is behind. It moves when an engine has taken the new weights, and computes with them what the trainer published.
- An engine that could not take new weights, or died, is started again on ``version``; one that dies, or cannot be
  started, more than ``MAX_RESTARTS`` times without having finished a request breaks the pool.
- Between ``sleep`` and ``wake`` no engine has or takes memory of its GPU; one that dies is started again after it.
- Others go on, also to new weights, while an engine is being started; ``close`` ends that start.
- State is read and changed under ``changed``, which the owner shares; ``on_lost(index)`` is called under it when an
  engine is gone, and ``on_ready()`` when one has come back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from forge_core.generation import engine_weights
from forge_core.generation.base import GenerationError, check_newer
from forge_core.generation.engine_path import lasting_path
from forge_core.generation.vllm_replica import Replica, ReplicaDied
from forge_core.generation.vllm_settings import VLLMSettings
from forge_core.models import probe
from forge_core.models.errors import WeightsError
from forge_core.stop import Stopped, StopToken
from forge_core.temporary import temporary_folder

log = logging.getLogger("forge")
MAX_RESTARTS = 3
RETRY_S = 2.0  # after a start that failed


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
        self._logs, self._changed, self._stop = logs, changed, stop or StopToken()
        self._ending = StopToken()  # of starts
        self._on_done, self._on_lost, self._on_ready = on_done, on_lost, on_ready
        self._updating = threading.Lock()  # an update sees an engine, or that one finds what came of the update
        self._waking = threading.Lock()  # held before ``_updating``: nothing starts between ``sleep`` and ``wake``
        self._restarts = [0] * len(settings.gpus)
        self._replicas: list[Replica | None] = [None] * len(settings.gpus)
        self._loading = {gpus: threading.Lock() for gpus in settings.gpus if settings.measures}
        self._signature = engine_weights.signature(weights(version))

    def start(self) -> None:
        """Start all engines, side by side. Raises ReplicaDied for the first that cannot start: the others are not
        waited for, and ``close`` ends those that did start."""

        def start(index: int) -> None:
            try:
                self._replicas[index] = self._started(index)
            except BaseException:
                self._ending.set("another engine cannot start")
                raise

        with ThreadPoolExecutor(len(self._replicas)) as pool:
            starts = [pool.submit(start, index) for index in range(len(self._replicas))]
        errors = [error for started in starts if (error := started.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):  # the cause first
            raise error

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
        if self.closed:
            raise GenerationError("the generator was shut down")
        if self.broken is not None:
            raise self.broken

    def succeeded(self, index: int) -> None:
        """Engine ``index`` has finished a request."""
        self._restarts[index] = 0

    def update(self, version: int) -> None:
        """Move every engine to ``version``. ValueError for an older one; WeightsError when the files do not fit or an
        engine could not take them: then the present version stays the one that is served. An engine that dies meanwhile
        for another reason is started again; when none is left, those that come back get the new weights."""
        for _ in range(MAX_RESTARTS + 1):
            if self._moved(version):
                return
        self.any()  # or the error of engines that are not started any more
        raise WeightsError(
            f"every engine died while it took version {version}, {MAX_RESTARTS + 1} times; version {self.version} "
            f"keeps serving (logs: {self._logs})"
        )

    def _moved(self, version: int) -> bool:
        """Whether ``version`` is served now; False when every engine died."""
        self.any()
        with self._updating:
            if version == self.version:
                return True
            check_newer(version, self.version)
            started = time.monotonic()
            folder = self.weights(version)  # fetched and verified while the engines go on
            engine_weights.check_same(folder, self._signature)
            fetched = time.monotonic() - started
            times = self._swap(version, folder)
            if not times:
                return False
            slowest = max(times, key=lambda t: sum(t.values()))
            self.last_update = {"fetch": fetched, **slowest}
            self.version = version
            return True

    def sleep(self) -> None:
        """Free the GPUs."""
        with self._waking, self._updating:
            self.asleep = True
            self._tell("sleep")

    def wake(self) -> None:
        """Take the memory back."""
        with self._waking, self._updating:
            self._tell("wake")
        with self._changed:
            self.asleep = False
            self._changed.notify_all()

    def _tell(self, what: str) -> None:
        for replica in self.live().values():
            with suppress(ReplicaDied):  # then it has freed everything, and is started again
                replica.call(what)

    def close(self) -> None:
        self._ending.set("the generator was shut down")
        with self._changed:
            self.closed = True
            replicas = [r for r in self._replicas if r is not None]
            self._changed.notify_all()
        for replica in replicas:
            replica.close()

    def _started(self, index: int) -> Replica:
        """A new engine number ``index`` that serves the present version. One that measures the free memory of its GPUs
        is alone in loading on them."""
        with self._loading.get(self.settings.gpus[index], nullcontext()):
            for stop in (self._stop, self._ending):
                stop.check()
            return self._loaded(index, self.version)

    def _loaded(self, index: int, version: int) -> Replica:
        name, folder = f"vllm-{index}", self.weights(version)
        with self._loadable(folder) as loaded, lasting_path(loaded) as path:
            start = {
                "engine_args": self.settings.arguments(index, path),
                "version": version,
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
            replica.wait_ready(self._stop, self._ending)
        return replica

    @contextmanager
    def _loadable(self, folder: Path) -> Iterator[Path]:
        """What vLLM loads: the folder, or on a CPU an untied view of it (see ``engine_weights``) while it loads."""
        if not self.settings.on_cpu or not engine_weights.is_tied(folder):
            yield folder
            return
        with temporary_folder("engine") as view:
            yield engine_weights.untied_view(folder, view / "model")

    def _swap(self, version: int, folder: Path) -> list[dict[str, float]]:
        """Hand ``folder`` to every engine; seconds of each phase, for every engine that lived to take it."""
        expected, replicas = probe.read(folder), list(self.live().values())

        def update(replica: Replica) -> dict[str, float] | ReplicaDied | None:
            try:
                return replica.update(version, handed, drain=self.settings.drain, probe=expected)
            except ReplicaDied as error:
                return error if replica.refused else None

        with self._loadable(folder) as handed, ThreadPoolExecutor(len(self._replicas)) as pool:
            outcomes = list(pool.map(update, replicas))
        errors = [outcome for outcome in outcomes if isinstance(outcome, ReplicaDied)]
        if errors:
            raise WeightsError(
                f"{errors[0]}; version {self.version} keeps serving, and version {version} can be tried again"
            ) from errors[0]
        return [outcome for outcome in outcomes if isinstance(outcome, dict)]

    def _on_death(self, index: int, reason: str) -> None:
        """Called in the reader thread of a dead engine."""
        with self._changed:
            self._replicas[index] = None
            if not self._may_start(index, "died", reason):
                return
            self._on_lost(index)
        threading.Thread(target=self._restart, args=(index,), name=f"vllm-{index}-restart", daemon=True).start()

    def _may_start(self, index: int, failed: str, reason: str) -> bool:
        """Whether engine ``index``, which has ``failed``, is started once more; else the pool is closed or broken."""
        with self._changed:
            if self.closed or self.broken:
                return False
            self._restarts[index] += 1
            log.warning("vllm-%d %s (%s); starting it again on version %d", index, failed, reason, self.version)
            if self._restarts[index] > MAX_RESTARTS:
                self._break(f"vllm-{index} {failed} {MAX_RESTARTS + 1} times in a row: {reason}")
                return False
            return True

    def _restart(self, index: int) -> None:
        while True:
            try:
                self._start_again(index)
                return
            except Stopped as stopped:
                self._break(str(stopped))
                return
            except BaseException as error:  # whatever it is, those who wait for this engine must hear of it
                if not self._may_start(index, "failed to start", str(error)):
                    return
            self._ending.wait(RETRY_S)

    def _start_again(self, index: int) -> None:
        """Engine number ``index`` once more, as soon as its GPU may be used; nothing after ``close``."""
        while not self.closed:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or not self.asleep)
            with self._waking:
                if not self.asleep:
                    self._add(index, self._started(index))
                    return

    def _add(self, index: int, replica: Replica) -> None:
        """Make the new ``replica`` engine number ``index``, once it has what others got while it was being started."""
        with self._updating:
            self._catch_up(replica)
            with self._changed:
                if self.closed:
                    replica.close()
                elif replica.alive:  # otherwise ``_on_death`` has begun another
                    self._replicas[index] = replica
                    self._on_ready()
                self._changed.notify_all()

    def _catch_up(self, replica: Replica) -> None:
        if replica.version == self.version:
            return
        folder = self.weights(self.version)
        with self._loadable(folder) as handed, suppress(ReplicaDied):
            replica.update(self.version, handed, drain=False, probe=probe.read(folder))

    def _break(self, reason: str) -> None:
        with self._changed:
            self.broken = GenerationError(reason)
            self._changed.notify_all()

"""A run whose processes are killed, and started again by whoever looks after it: one flow, or roles.

What a kill costs is read from the store: how long ago the killed kind had made its newest object (work in progress is
what is lost, and waiting counts as work), and how soon after the kill such an object appears again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from forge_core.store import Store, open_store
from tests.faults.processes import START_S, Forge, write_config
from tests.faults.servers import Server

ROLES = ("trainer", "generator", "scorer", "reference")
CHILDREN = {"trainer rank": "rank_main", "vllm engine": "EngineCore"}  # kind: what its processes are called
PRODUCTS = {  # kind: where its objects lie; "": any object of the run
    **{"generator": "episodes", "vllm engine": "episodes", "scorer": "rewards", "reference": "reference"},
    **{"trainer": "ledger", "trainer rank": "ledger", "flow": "", "prefect server": "", "s3 server": ""},
}
COMPILED = "torchinductor_"  # a cache of torch, kept between processes on purpose
BAD_INPUT = 2  # the exit status of what no restart mends, such as code that changed meanwhile
LOOK_S = 0.1
TIDY_S = 10.0  # in which guards have removed what their processes left


@dataclass
class Kill:
    """One kill. Times in seconds; ``recovery_s`` is None when the run had made all its objects of this kind before."""

    kind: str
    committed: int
    lost_s: float
    recovery_s: float | None


class Supervised:
    """``processes``: ``("flow",)`` or roles. ``store``: a URI. Each process has a server's address in its environment
    (``environment``) or starts one of its own, and a folder for temporary files that must be empty in the end."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        processes: Sequence[str],
        environment: dict[str, str],
        store: str | None = None,
    ) -> None:
        self.folder, self.config, self.names = folder, config, processes
        self.environment = environment | {"TMPDIR": str(folder / "tmp"), "FORGE_HOME": str(folder / "home")}
        self.uri = store or str(folder / "store")
        (folder / "tmp").mkdir(parents=True)
        self._config_file = write_config(folder, config)
        self.running: dict[str, Forge] = {}
        self.ended: list[Forge] = []
        self.starts: Counter[str] = Counter()
        self._grew: dict[str, tuple[int, float]] = {}  # product: how many objects, since when

    @property
    def store(self) -> Store:
        return open_store(self.uri)

    # Looking ----------------------------------------------------------------------------------------------------------

    def objects(self) -> list[str]:
        return self.store.list("runs/tiny")

    def look(self) -> int:
        """See what is there; the number of committed training steps."""
        keys, now = self.objects(), time.monotonic()
        for product in set(PRODUCTS.values()):
            count = made(keys, product)
            if count != self._grew.get(product, (-1, 0.0))[0]:
                self._grew[product] = (count, now)
        return made(keys, "ledger")

    def tend(self) -> None:
        """Start what does not run and has not finished; a process that failed is started again."""
        for name in self.names:
            forge = self.running.get(name)
            if forge is None or forge.process.poll() not in (None, 0):
                if forge is not None:
                    assert forge.process.returncode != BAD_INPUT, forge.output
                    self.ended.append(forge)
                self.running[name] = self._start(name)

    def finished(self) -> bool:
        return len(self.running) == len(self.names) and all(f.process.poll() == 0 for f in self.running.values())

    def until(self, condition: Callable[[int], bool], timeout_s: float = START_S) -> None:
        """Tend to the run until ``condition`` of the number of committed steps, or until it has finished."""
        deadline = time.monotonic() + timeout_s
        self.tend()
        while not condition(self.look()) and not self.finished():
            assert time.monotonic() < deadline, f"nothing within {timeout_s:.0f} s:\n{self.output()}"
            assert sum(self.starts.values()) < 200, self.output()
            time.sleep(LOOK_S)
            self.tend()

    def finish(self) -> None:
        self.until(lambda _: False, 2 * START_S)
        self.check_nothing_left()

    def output(self) -> str:
        forges = [*self.ended[-3:], *self.running.values()]
        return "\n".join(f"== status {f.process.poll()}\n{f.output[-3000:]}" for f in forges)

    # Killing ----------------------------------------------------------------------------------------------------------

    def kill(self, kind: str, server: Server | None = None) -> Kill:
        """``kill -9`` of one process of ``kind``; a ``server`` is started again. Returns once the run recovered."""
        committed, product = self.look(), PRODUCTS[kind]
        lost_s = time.monotonic() - self._grew[product][1]
        before = made(self.objects(), product)
        if server is not None:
            server.kill()
        elif kind in CHILDREN:
            family = set(self._children(kind))
            self.child(kind).kill()
        else:
            self.running[kind].kill()
            assert self.running[kind].orphans() == []
        killed = time.monotonic()
        if server is not None:
            server.start()
        elif kind in CHILDREN:  # what its process has of it may yet be stored: only another one's work counts
            self.until(lambda _: bool(set(self._children(kind)) - family))
            before = made(self.objects(), product)
        self.until(lambda _: made(self.objects(), product) > before)
        recovered = made(self.objects(), product) > before
        return Kill(kind, committed, lost_s, time.monotonic() - killed if recovered else None)

    def has(self, kind: str) -> bool:
        """Whether a process of ``kind`` lives."""
        if kind in CHILDREN:
            return bool(self._children(kind))
        return kind not in self.names or self.running[kind].process.poll() is None

    def child(self, kind: str) -> psutil.Process:
        found = self._children(kind)
        assert found, f"no {kind} to kill:\n{self.output()}"
        return found[-1]

    def _children(self, kind: str) -> list[psutil.Process]:
        # By descent: vLLM writes its title over the environment, and with it over the tag.
        owners = [psutil.Process(forge.process.pid) for forge in self.running.values() if forge.process.poll() is None]
        family = [process for owner in owners for process in owner.children(recursive=True)]
        return [process for process in family if CHILDREN[kind] in title(process)]

    # The rest ---------------------------------------------------------------------------------------------------------

    def check_nothing_left(self) -> None:
        """No process, no temporary file."""
        for forge in (*self.ended, *self.running.values()):
            assert forge.orphans() == []
        deadline = time.monotonic() + TIDY_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        assert left == [], f"left over: {left}"

    def _left(self) -> list[str]:
        """Temporary files, with what is in their folders."""
        temporary = self.folder / "tmp"
        paths = [str(path.relative_to(temporary)) for path in temporary.rglob("*")]
        return [path for path in paths if not path.startswith(COMPILED)]

    def end(self) -> None:
        """Clean up after a failed test."""
        for forge in (*self.ended, *self.running.values()):
            forge.end()

    def _start(self, name: str) -> Forge:
        self.starts[name] += 1
        if name != "flow":
            self._create()
            return self._forge("role", name, "tiny", "--store", self.uri)
        if self.store.exists("runs/tiny/run.json"):
            return self._forge("resume", "tiny", "--store", self.uri)
        return self._forge("train", self._config_file, "--store", self.uri)

    def _create(self) -> None:
        if not self.store.exists("runs/tiny/run.json"):
            created = self._forge("create", self._config_file, "--store", self.uri)
            assert created.wait() == 0, created.output

    def _forge(self, *arguments: object) -> Forge:
        own = "PREFECT_API_URL" not in self.environment
        return Forge(self.folder, *arguments, own_server=own, environment=self.environment)


def title(process: psutil.Process) -> str:
    """What a living process is called; nothing for one that has just ended."""
    with suppress(psutil.Error):
        return " ".join([process.name(), *process.cmdline()])
    return ""


def made(keys: Sequence[str], product: str) -> int:
    """Finished objects of ``product`` among ``keys``."""
    return sum(key.startswith(f"runs/tiny/{product}") and done(key) for key in keys)


def done(key: str) -> bool:
    return key.endswith("/manifest.json") or "/ledger/0" in key

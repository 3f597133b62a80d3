"""Actors of the tests: child processes import them from here."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

from forge_core.services import ForgeActor


class Refused(Exception):
    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} ({code})")
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return Refused, (str(self), self.code)


class Counter(ForgeActor):
    def __init__(self, value: int = 0, log: Path | None = None) -> None:
        self.value, self.log = value, log

    def setup(self) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{time.monotonic()}\n")

    def increment(self) -> int:
        self.value += 1
        return self.value

    def current(self) -> int:
        return self.value

    def place(self) -> tuple[int, int, int]:
        return os.getpid(), self.rank, self.size

    def echo_size(self, text: str) -> tuple[int, int]:
        return len(text), os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def refuse(self) -> None:
        raise Refused("no", 7)

    def fail_locally(self) -> None:
        class Local(Exception):
            pass

        raise Local("cannot travel")

    def only_here(self) -> object:
        """An object of a class that only this process has."""
        module = types.ModuleType("only_here")
        exec("class Only: pass", vars(module))
        sys.modules["only_here"] = module
        return module.Only()

    def unpicklable(self) -> object:
        return threading.Lock()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_unless(self, path: Path) -> int:
        """Dies the first time."""
        if not path.exists():
            path.touch()
            self.die()
        return os.getpid()

    def slow_increment(self) -> int:
        before = self.value
        time.sleep(0.02)
        self.value = before + 1
        return self.value

    async def wait(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()

    def block(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()


class Meeting(ForgeActor):
    """Async calls that come together."""

    def __init__(self) -> None:
        self.here, self.most = 0, 0

    async def meet(self) -> int:
        self.here += 1
        self.most = max(self.most, self.here)
        await asyncio.sleep(0.05)
        self.here -= 1
        return self.most


class Ends(ForgeActor):
    """Raises what ends more than a method."""

    def no_more_rows(self) -> int:
        return next(iter(()))

    def cancelled(self) -> None:
        raise asyncio.CancelledError("enough")

    def exits(self) -> None:
        sys.exit(3)

    def interrupted(self) -> None:
        raise KeyboardInterrupt

    async def exits_in_a_coroutine(self) -> None:
        sys.exit(3)

    async def still_there(self) -> bool:
        return True


class BadInit(ForgeActor):
    def __init__(self) -> None:
        raise RuntimeError("the model is missing")


class BadSetup(ForgeActor):
    def setup(self) -> None:
        raise RuntimeError("the weights are missing")


class DiesWhenStarted(ForgeActor):
    """Starts once, and never again."""

    def __init__(self, mark: Path) -> None:
        if mark.exists():
            os._exit(3)
        mark.touch()

    def die(self) -> None:
        os._exit(4)

"""Turns on a shared GPU."""

from __future__ import annotations

import random
import threading
import time
from unittest.mock import Mock

import pytest

from forge_core.runs import context
from forge_core.runs.turns import Turns
from forge_core.stop import Stopped, StopToken
from tests.runs.harness import memory, new_run


def test_sides_exclude_each_other_and_neither_starves() -> None:
    calls: list[str] = []
    running = {"generator": 0, "trainer": 0}
    most = dict(running)
    lock = threading.Lock()
    turns = Turns(
        {"generator": lambda: calls.append("sleep")}, {"generator": lambda: calls.append("wake")}, StopToken()
    )

    def work(side: str, times: int) -> None:
        for _ in range(times):
            with turns.on(side):
                with lock:
                    running[side] += 1
                    most[side] = max(most[side], running[side])
                    assert not (running["generator"] and running["trainer"])
                time.sleep(random.random() * 0.002)
                with lock:
                    running[side] -= 1

    threads = [threading.Thread(target=work, args=("generator", 100)) for _ in range(4)]
    threads.append(threading.Thread(target=work, args=("trainer", 20)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most["generator"] > 1
    assert calls == ["wake", "sleep"] * (len(calls) // 2) + ["wake"] * (len(calls) % 2)
    assert calls.count("sleep") >= 10


def test_a_failed_change_is_made_again() -> None:
    attempts: list[int] = []

    def wake() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("not yet")

    turns = Turns({}, {"generator": wake}, StopToken())
    with pytest.raises(OSError, match="not yet"), turns.on("generator"):
        pass
    with turns.on("generator"):
        assert len(attempts) == 2


def test_waiting_ends_when_the_run_is_stopped() -> None:
    stop = StopToken()
    turns = Turns({}, {}, stop)
    with turns.on("trainer"):
        threading.Timer(0.1, stop.set, ["test"]).start()
        with pytest.raises(Stopped), turns.on("generator"):
            pass


def test_the_trainer_gives_its_memory_back_before_the_engine_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(context, "takes_turns", lambda ctx: True)
    ctx = new_run(memory())
    monkeypatch.setattr(ctx.trainer, "free_cached", lambda: calls.append("free"))
    monkeypatch.setattr(ctx, "_generator", Mock(sleep=lambda: calls.append("sleep"), wake=lambda: calls.append("wake")))
    for side in ("trainer", "generator", "trainer"):
        with ctx.turns.on(side):
            calls.append(side)
    assert calls == ["trainer", "free", "wake", "generator", "sleep", "trainer"]

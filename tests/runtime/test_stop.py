from __future__ import annotations

import threading
import time

import pytest

from forge_core.stop import Stopped, StopToken


def test_a_clear_token_lets_work_go_on() -> None:
    token = StopToken()
    token.check()
    assert not token.is_set()
    assert token.reason is None
    assert token.wait(0.01) is False


def test_the_first_reason_stands() -> None:
    token = StopToken()
    token.set("Ctrl-C")
    token.set("SIGTERM")
    assert token.reason == "Ctrl-C"
    with pytest.raises(Stopped, match="stopped: Ctrl-C") as caught:
        token.check()
    assert caught.value.reason == "Ctrl-C"


def test_setting_wakes_every_waiter() -> None:
    token = StopToken()
    woken: list[bool] = []
    waiters = [threading.Thread(target=lambda: woken.append(token.wait(10))) for _ in range(5)]
    for waiter in waiters:
        waiter.start()
    started = time.monotonic()
    token.set("test")
    for waiter in waiters:
        waiter.join(5)
    assert woken == [True] * 5
    assert time.monotonic() - started < 1

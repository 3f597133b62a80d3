from __future__ import annotations

import logging
import threading
import time

import pytest

from forge_core.observability.best_effort import BestEffort


def test_calls_run_in_order_and_close_waits_for_them() -> None:
    seen: list[int] = []
    effort = BestEffort(limit_s=5)
    assert all(effort.submit(seen.append, n) for n in range(10))
    assert effort.close(timeout=5)
    assert seen == list(range(10))
    assert (effort.done, effort.failed, effort.dropped) == (10, 0, 0)


def test_a_failure_is_counted_and_logged_once_and_does_not_reach_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ConnectionError("server is gone")

    effort = BestEffort(limit_s=5)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert effort.submit(fail)
        assert effort.close(timeout=5)
    assert effort.failed == 3
    assert str(effort.last_error) == "server is gone"
    own = [message for message in caplog.messages if "fail failed" in message]  # not what other tests have left running
    assert [message.count("server is gone") for message in own] == [1]


def test_a_hanging_call_blocks_nobody_and_later_ones_are_dropped() -> None:
    release = threading.Event()
    effort = BestEffort(limit_s=0.05)
    effort.submit(release.wait, 10)
    time.sleep(0.1)
    started = time.monotonic()
    assert not any(effort.submit(print) for _ in range(1000))
    assert not effort.close(timeout=0.05)
    assert time.monotonic() - started < 0.5
    assert effort.dropped == 1000
    release.set()


def test_an_overflowing_queue_drops_and_counts() -> None:
    release = threading.Event()
    effort = BestEffort(limit_s=10, capacity=3)
    effort.submit(release.wait, 10)
    time.sleep(0.05)  # the worker holds the first call, three fit behind it
    assert [effort.submit(int) for _ in range(5)] == [True, True, True, False, False]
    release.set()
    assert effort.close(timeout=5)
    assert (effort.done, effort.dropped) == (4, 2)


def test_nothing_is_taken_after_close() -> None:
    effort = BestEffort(limit_s=1)
    assert effort.close(timeout=1)
    assert not effort.submit(print)
    assert effort.dropped == 1

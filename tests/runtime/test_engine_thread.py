from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from forge_core.engine_thread import SWITCH_S, EngineClosed, EngineThread
from forge_core.stop import Stopped, StopToken


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    engine = EngineThread("test-engine", threads=1)
    yield engine
    engine.close()


class Gate:
    """A call that occupies the engine until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(10)


def occupy(engine: EngineThread, pool: ThreadPoolExecutor) -> Gate:
    gate = Gate()
    pool.submit(engine.call, gate)
    assert gate.entered.wait(5)
    return gate


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_calls_of_all_threads_run_in_the_one_named_thread(engine: EngineThread) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: engine.call(lambda: threading.current_thread().name), range(40)))
    assert set(names) == {"test-engine"}


def test_arguments_and_result_pass_through(engine: EngineThread) -> None:
    assert engine.call(lambda a, b, *, c: (a, b, c), 1, 2, c=3) == (1, 2, 3)


def test_an_exception_reaches_the_caller_with_its_own_traceback(engine: EngineThread) -> None:
    def deep_inside() -> None:
        raise KeyError("the message")

    with pytest.raises(KeyError, match="the message") as caught:
        engine.call(deep_inside)
    assert "deep_inside" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_even_system_exit_leaves_the_thread_working(engine: EngineThread) -> None:
    with pytest.raises(SystemExit):
        engine.call(sys.exit, 3)
    assert engine.call(lambda: "alive") == "alive"


def test_lower_priority_numbers_go_first_and_equal_ones_in_order(engine: EngineThread) -> None:
    order: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        gate = occupy(engine, pool)
        for n, (name, priority) in enumerate([("late", 7), ("a", 3), ("b", 3), ("first", 1)], start=1):
            pool.submit(engine.call, order.append, name, priority=priority)
            wait_until(lambda n=n: len(engine._calls) == n)  # type: ignore[misc]
        gate.opened.set()
    assert order == ["first", "a", "b", "late"]


def test_a_queued_call_whose_stop_token_is_set_is_skipped(engine: EngineThread) -> None:
    ran: list[object] = []
    stop = StopToken()
    with ThreadPoolExecutor(2) as pool:
        gate = occupy(engine, pool)
        queued = pool.submit(engine.call, lambda stop: ran.append(stop), stop=stop)
        wait_until(lambda: len(engine._calls) == 1)
        stop.set("Ctrl-C")
        gate.opened.set()
        with pytest.raises(Stopped, match="Ctrl-C"):
            queued.result(5)
    assert ran == []


def test_a_call_from_the_engine_thread_itself_does_not_deadlock(engine: EngineThread) -> None:
    assert engine.call(lambda: engine.call(lambda: "nested")) == "nested"


def test_closing_twice_is_fine_and_later_calls_say_what_is_wrong() -> None:
    engine = EngineThread("short-lived", threads=1)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed, match="short-lived"):
        engine.call(lambda: None)


def test_closing_refuses_queued_calls_and_lets_the_running_one_end() -> None:
    engine = EngineThread("closing", threads=1)
    with ThreadPoolExecutor(3) as pool:
        gate = occupy(engine, pool)
        queued = pool.submit(engine.call, lambda: None)
        wait_until(lambda: len(engine._calls) == 1)
        closing = pool.submit(engine.close)
        with pytest.raises(EngineClosed):
            queued.result(5)
        gate.opened.set()
        closing.result(5)
    assert not engine._thread.is_alive()


def test_torch_state_is_set_in_the_engine_thread_only() -> None:
    engine = EngineThread("torch-state", threads=1)
    tiny = 1e-40  # a denormal float32

    def state() -> tuple[int, bool, float]:
        return torch.get_num_threads(), torch._C._is_multithreading_enabled(), float(torch.tensor([tiny]) * 1.0)

    assert engine.call(state) == (1, False, 0.0)
    assert torch._C._is_multithreading_enabled()
    assert float(torch.tensor([tiny]) * 1.0) > 0
    engine.close()


def test_an_idle_engine_holds_neither_arguments_nor_error_of_its_last_call(engine: EngineThread) -> None:
    class Batch:
        pass

    def fail(batch: Batch) -> None:
        raise ValueError("no")

    batch = Batch()
    seen = weakref.ref(batch)
    gc.disable()  # reference counting alone must free it: a batch can be gigabytes
    try:
        assert engine.call(lambda b: [b], batch) == [batch]
        with contextlib.suppress(ValueError):
            engine.call(fail, batch)
        del batch
        wait_until(lambda: seen() is None)
    finally:
        gc.enable()


def test_an_interrupted_caller_leaves_a_working_thread() -> None:
    code = """
import _thread, threading, time
from forge_core.engine_thread import EngineThread
engine = EngineThread("e", threads=1)
threading.Timer(0.5, _thread.interrupt_main).start()
try:
    engine.call(time.sleep, 1.0)
except KeyboardInterrupt:
    print("interrupted", engine.call(lambda: "alive"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "interrupted alive"


def test_the_thread_does_not_keep_the_process_alive() -> None:
    code = """
import threading, time
from forge_core.engine_thread import EngineThread
engine = EngineThread("e", threads=1)
threading.Thread(target=engine.call, args=(time.sleep, 60), daemon=True).start()
time.sleep(0.2)
"""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    assert time.monotonic() - started < 30


def test_an_engine_gets_the_interpreter_back_soon(engine: EngineThread) -> None:
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)

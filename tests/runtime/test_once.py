"""A property that is made once, whoever asks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from forge_core.once import once


class Engines:
    def __init__(self) -> None:
        self.made: list[str] = []
        self.fails = False

    @once
    def model(self) -> object:
        """A model."""
        self.made.append("model")
        time.sleep(0.1)
        if self.fails:
            raise RuntimeError("no memory")
        return object()

    @once
    def wrapped(self) -> tuple[object, object]:
        return self.model, self.model


def test_threads_that_ask_at_a_time_get_one_and_the_same() -> None:
    engines, start = Engines(), threading.Barrier(8)

    def ask(_: int) -> object:
        start.wait()
        return engines.model

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(ask, range(8)))
    assert engines.made == ["model"]
    assert found == {engines.model}
    assert engines.wrapped == (engines.model, engines.model)
    assert Engines().model != engines.model, "each instance has its own"


def test_what_failed_is_made_again() -> None:
    engines = Engines()
    engines.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        _ = engines.model
    engines.fails = False
    assert engines.model is engines.model
    assert engines.made == ["model", "model"]


def test_it_is_known_whether_it_was_made_and_may_be_forgotten() -> None:
    engines = Engines()
    assert "model" not in engines.__dict__
    first = engines.model
    assert engines.__dict__.pop("model") is first
    assert engines.model is not first
    assert Engines.model.__doc__ == "A model."

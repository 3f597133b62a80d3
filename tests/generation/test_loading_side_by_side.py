"""Which engines of a generator load at the same time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.generation import vllm_pool
from forge_core.generation.vllm_settings import VLLMSettings

pytestmark = pytest.mark.fast
STATED = {"kv_cache_memory_bytes": 4_000_000_000}


@pytest.mark.parametrize(
    ("gpus", "engine_args", "at_once"),
    [
        ((("0",), ("0",)), {}, 1),  # the second would find the memory of the first missing
        ((("0",), ("0",)), STATED, 2),
    ],
)
def test_engines_that_measure_the_memory_of_one_gpu_load_one_after_the_other(
    gpus: Any, engine_args: dict[str, Any], at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, most, both = [0], [0], threading.Barrier(2)

    def loaded(pool: vllm_pool.EnginePool, index: int, version: int) -> Any:
        loading[0] += 1
        most[0] = max(most[0], loading[0])
        if at_once == 2:
            both.wait(10.0)
        else:
            time.sleep(0.05)
        most[0] = max(most[0], loading[0])
        loading[0] -= 1
        return SimpleNamespace(alive=True, close=lambda: None)

    monkeypatch.setattr(vllm_pool.engine_weights, "signature", lambda folder: None)
    monkeypatch.setattr(vllm_pool.EnginePool, "_loaded", loaded)
    settings = VLLMSettings(gpus=gpus, engine_args=engine_args)
    nothing = lambda *_: None
    pool = vllm_pool.EnginePool(
        lambda version: tmp_path, 0, settings, logs=tmp_path, changed=threading.Condition(), on_done=nothing,
        on_lost=nothing, on_ready=nothing,
    )  # fmt: skip
    pool.start()
    assert (most[0], len(pool.live())) == (at_once, 2)

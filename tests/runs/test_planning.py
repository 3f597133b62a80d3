"""Plans, shard tracking and estimates: pure, fast."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.algorithms.fates import PROMPT_TOO_LONG
from forge_core.data.cursor import Cursor
from forge_core.data.prompts import load_prompts
from forge_core.runs.context import ShardTracker
from forge_core.runs.estimate import EFFICIENCY, START_SECONDS, estimate, flops_per_second
from forge_core.runs.model_shape import model_shape
from forge_core.runs.planning import Planner, planned_groups, shard_requests
from forge_core.runs.training import checkpoint_due
from forge_core.stop import Stopped, StopToken
from tests.runs.harness import tiny


def plan_of(batch: int, cursor: Cursor, *overrides: str, length: int = 8) -> dict[str, Any]:
    config = tiny(*overrides)
    assert config.dataset is not None
    prompts = load_prompts(config.dataset, seed=0)
    encode = lambda row: [1] * (length if row % 7 else 12)  # every seventh prompt is too long (10 fit)
    return Planner(config, prompts, list(range(len(prompts))), encode).plan(batch, cursor)


@settings(max_examples=30, deadline=None)
@given(shards=st.integers(1, 8), batches=st.integers(1, 6))
def test_every_group_lies_in_one_shard_and_batches_continue_the_cursor(shards: int, batches: int) -> None:
    cursor, rows = Cursor(0, 0), []
    for batch in range(batches):
        plan = plan_of(batch, cursor, f"rollout.shards={shards}")
        alive = [g["group"] for g in plan["groups"] if not g["skipped"]]
        assert [g for shard in plan["shards"] for g in shard] == alive
        assert len(alive) == 8
        assert max(map(len, plan["shards"])) - min(map(len, plan["shards"])) <= 1
        rows += [g["row"] for g in plan["groups"]]
        cursor = Cursor(**plan["cursor"]["after"])
    assert len(rows) == len(set(rows)), "no prompt twice within an epoch"


def test_a_plan_is_a_pure_function_of_its_input_and_seeds_differ_everywhere() -> None:
    assert plan_of(3, Cursor(0, 17)) == plan_of(3, Cursor(0, 17))
    seeds = [s for b in range(4) for g in plan_of(b, Cursor(0, 0))["groups"] for s in g["seeds"]]
    assert len(seeds) == len(set(seeds))
    other = plan_of(3, Cursor(0, 17), "run.seed=4")
    assert other["groups"][0]["seeds"] != plan_of(3, Cursor(0, 17))["groups"][0]["seeds"]


def test_too_long_prompts_are_planned_with_their_reason_and_replaced() -> None:
    plan = plan_of(0, Cursor(0, 0), "dataset.shuffle=false")
    skipped = [g for g in plan["groups"] if g["skipped"]]
    assert [(g["row"], g["skipped"], g["prompt_tokens"]) for g in skipped] == [
        (0, PROMPT_TOO_LONG, 12),
        (7, PROMPT_TOO_LONG, 12),
    ]
    groups = planned_groups("r", plan)
    assert sum(len(g.episode_ids) for g in groups) == 32 + 8
    requests = [r for shard in range(2) for r in shard_requests("r", plan, shard)]
    assert [r.request_id for r in requests] == [i for g in groups if not g.skipped for i in g.episode_ids]


def test_the_tracker_waits_for_every_older_shard() -> None:
    tracker, stop, passed = ShardTracker(2), StopToken(), threading.Event()
    tracker.begin(3)
    tracker.wait_before(3, stop)
    waiter = threading.Thread(target=lambda: (tracker.wait_before(5, stop), passed.set()))
    waiter.start()
    for batch, shard in ((4, 0), (4, 1), (3, 1)):
        tracker.finish(batch, shard)
    assert not passed.wait(0.1)
    tracker.finish(3, 0)
    assert passed.wait(2)
    waiter.join()


def test_a_stop_ends_the_trackers_wait() -> None:
    tracker, stop = ShardTracker(1), StopToken()
    stop.set("Ctrl-C")
    started = time.monotonic()
    with pytest.raises(Stopped):
        tracker.wait_before(1, stop)
    assert time.monotonic() - started < 1


def test_checkpoints_are_due_at_the_interval_and_at_the_end() -> None:
    assert [b for b in range(5) if checkpoint_due(tiny("steps=5"), b)] == [1, 3, 4]
    assert [b for b in range(5) if checkpoint_due(tiny("steps=5", "checkpoint.interval=0"), b)] == [4]


def test_the_estimate_counts_the_models_parameters_and_grows_with_the_run() -> None:
    quickstart = tiny("model.hidden_size=128", "model.intermediate_size=384", "model.num_layers=2",
                      "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=32")  # fmt: skip
    shape = model_shape(quickstart)
    assert (shape.parameters, shape.vocabulary) == (pytest.approx(396_672, rel=0.01), 21)
    short, long = (estimate(tiny(f"steps={n}"), 1e11) for n in (10, 100))
    assert long.seconds - START_SECONDS == pytest.approx(10 * (short.seconds - START_SECONDS), rel=0.3)
    assert long.stored > short.stored


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [("NVIDIA H200", "bfloat16", 989e12), ("NVIDIA H200", "float32", 989e12 / 16), ("Unheard-of", "bfloat16", 121e12)],
)
def test_the_speed_of_a_gpu_is_looked_up_and_takes_no_memory_on_it(
    name: str, dtype: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("forge_core.runs.estimate.visible_gpus", lambda: ("0", "1"))
    monkeypatch.setattr("forge_core.devices.visible_gpus", lambda: ("0", "1"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: asked.append(device) or name)
    monkeypatch.setattr("torch.ones", lambda *_, **__: pytest.fail("measured"))
    assert flops_per_second(tiny(f"training.dtype={dtype}")) * EFFICIENCY == pytest.approx(0.3 * peak)
    assert asked == ["cuda:1"], "the trainer's"


def test_the_speed_of_a_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: pytest.fail("asked"))
    assert 1e8 < flops_per_second(tiny("services.trainer.with_gpus=false")) < 1e14

"""Properties of the staleness window, on a plain executor with a fake clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.grpo import iterate
from flows.window import Window
from forge_core.config import RunConfig
from forge_core.runs import RunRef
from forge_core.stop import Stopped, StopToken
from tasks import Stages
from tests.flows.simulation import Executor, SimTask

SHARDS = 2
REF = RunRef("r", "memory://x")


@dataclass
class World:
    """A toy policy: one number. Version v + 1 = f(version v, batch v), so any mix-up shows."""

    staleness: int
    weights: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    ages: list[int] = field(default_factory=list)
    fates: Counter[tuple[int, int]] = field(default_factory=Counter)
    sampled: Counter[tuple[int, int]] = field(default_factory=Counter)
    evaluated: int = 0
    most_open: int = 0
    opened: set[int] = field(default_factory=set)

    def sample(self, run: RunRef, batch: int, shard: int) -> tuple[int, int, int, float]:
        version = max(self.weights)
        self.sampled[batch, shard] += 1
        self.opened.add(batch)
        self.most_open = max(self.most_open, len(self.opened))
        return batch, shard, version, self.weights[version] * (batch + 1) + shard

    def evaluate(self, run: RunRef, version: int) -> None:
        assert max(self.weights) == version, "the version is evaluated while it is the newest"
        assert all(self.sampled[version, shard] for shard in range(SHARDS)), "the batch goes first"
        self.evaluated += 1

    def train(self, run: RunRef, batch: int, rollouts: list[Any], *_: Any) -> tuple[int, float]:
        assert max(self.weights) == batch, "training steps commit in order"
        for b, shard, version, _value in rollouts:
            assert b == batch
            assert 0 <= batch - version <= self.staleness, "the bound holds at consumption"
            self.ages.append(batch - version)
            self.fates[b, shard] += 1
        return batch, 0.5 * self.weights[batch] + 0.01 * sum(r[3] for r in rollouts)

    def commit(self, outcome: tuple[int, float]) -> None:
        batch, value = outcome
        self.weights[batch + 1] = value
        self.opened.discard(batch)


def simulate(
    staleness: int,
    steps: int,
    durations: list[float],
    fail: tuple[str, int] | None = None,
    first: int = 0,
    evaluation: float | None = None,
) -> tuple[World, Executor]:
    """Run the real loop; ``fail`` names the stage and batch that raises, ``evaluation`` has the seconds that the
    evaluation of each version takes on an engine of its own."""
    evaluate = {"prompts": 0} if evaluation is None else {"prompts": 1, "interval": 1}
    config = RunConfig(steps=steps, max_staleness=staleness, grpo={"beta": 0}, eval=evaluate)
    executor = Executor({"generator": 1, "scorer": 2, "trainer": 1, "evaluator": 1})
    world = World(staleness)
    world.weights = {first: 1.0}
    times = {"rollout": durations[0::3], "score": durations[1::3], "train": durations[2::3], "evaluate": [evaluation]}

    def task(stage: str, engine: str, begin: Any) -> SimTask:
        seconds = lambda args: times[stage][args[1] % len(times[stage])]

        def begin_or_fail(*args: Any) -> Any:
            value = begin(*args)
            return (
                (value, RuntimeError(f"own error of {stage} {args[1]}")) if fail == (stage, args[1]) else (value, None)
            )

        def end(begun: Any) -> Any:
            value, error = begun
            if error:
                raise error
            return value

        return SimTask(executor, engine, seconds, begin_or_fail, end)

    train = task("train", "trainer", world.train)
    submit = train.submit

    def submit_and_commit(*args: Any, wait_for: Any = ()) -> Any:
        future = submit(*args, wait_for=wait_for)
        future.callbacks.append(lambda f: world.commit(f.value) if f.state.is_completed() else None)
        return future

    train.submit = submit_and_commit  # type: ignore[method-assign]
    stages = Stages(
        rollout=task("rollout", "generator", world.sample),
        score=task("score", "scorer", lambda run, batch, rollout: rollout),
        refill=task("score", "scorer", lambda run, batch, rewards: rewards),
        evaluate=task("evaluate", "evaluator", world.evaluate),
        train=train,
    )
    iterate(REF, stages, Window(pause=executor.advance), config, first, SHARDS)
    return world, executor


DURATIONS = st.lists(st.floats(0.01, 10.0), min_size=3, max_size=12)


@settings(max_examples=150, deadline=None)
@given(staleness=st.sampled_from([0, 1, 2, 4]), steps=st.integers(1, 12), durations=DURATIONS)
def test_lag_never_exceeds_the_bound_and_every_shard_is_consumed_once(
    staleness: int, steps: int, durations: list[float]
) -> None:
    world, _ = simulate(staleness, steps, durations)
    assert max(world.ages) <= staleness
    assert world.fates == Counter({(b, s): 1 for b in range(steps) for s in range(SHARDS)})
    assert world.most_open <= staleness + 1


@settings(max_examples=60, deadline=None)
@given(steps=st.integers(1, 10), durations=DURATIONS)
def test_on_policy_equals_a_sequential_loop_bit_for_bit(steps: int, durations: list[float]) -> None:
    world, _ = simulate(0, steps, durations)
    weight = 1.0
    for b in range(steps):
        weight = 0.5 * weight + 0.01 * sum(weight * (b + 1) + shard for shard in range(SHARDS))
    assert world.weights[steps] == weight


@settings(max_examples=100, deadline=None)
@given(
    staleness=st.sampled_from([0, 1, 2, 4]),
    durations=DURATIONS,
    stage=st.sampled_from(["rollout", "score", "train"]),
    batch=st.integers(0, 7),
)
def test_a_failed_task_stops_the_loop_with_its_own_error(
    staleness: int, durations: list[float], stage: str, batch: int
) -> None:
    with pytest.raises(RuntimeError, match=f"own error of {stage} {batch}") as caught:
        simulate(staleness, 8, durations, fail=(stage, batch))
    assert any(f"{stage} of batch {batch}" in note for note in caught.value.__notes__)


def test_staleness_one_hides_generation_behind_training() -> None:
    # One shard takes half of a batch's generation, so generate = train = 1 s.
    steps, durations = 20, [0.5, 0.0001, 1.0]
    _, synchronous = simulate(0, steps, durations)
    _, overlapped = simulate(1, steps, durations)
    assert synchronous.clock == pytest.approx(2 * steps, rel=0.01)
    assert overlapped.clock == pytest.approx(synchronous.clock / 2, rel=0.06)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_evaluations_that_take_no_longer_than_a_step_cost_no_time(staleness: int) -> None:
    steps, durations = 20, [0.5, 0.0001, 1.0]
    _, without = simulate(staleness, steps, durations)
    world, evaluated = simulate(staleness, steps, durations, evaluation=0.99)
    assert world.evaluated == steps
    assert evaluated.clock == pytest.approx(without.clock)


def test_a_resumed_loop_starts_at_the_first_uncommitted_step() -> None:
    world, _ = simulate(1, 6, [1.0, 0.1, 1.0], first=4)
    assert sorted(b for b, _ in world.fates) == [4, 4, 5, 5]


def test_a_set_stop_token_ends_the_wait() -> None:
    stop = StopToken()
    executor = Executor({"generator": 1})
    slow = SimTask(executor, "generator", lambda args: 1e9, lambda *args: None)
    window = Window(stop, pause=lambda: stop.set("Ctrl-C"))
    window.open(0, slow.submit(REF, 0))
    with pytest.raises(Stopped, match="Ctrl-C"):
        window.drain()
    assert window.settle(0.2) == ["train of batch 0"]


def test_futures_of_closed_batches_are_dropped() -> None:
    executor = Executor({"generator": 1})
    quick = SimTask(executor, "generator", lambda args: 1.0, lambda *args: None)
    window = Window(pause=executor.advance)
    for batch in range(100):
        window.committed(batch - 2)
        window.open(batch, quick.submit(REF, batch))
    assert len(window._open) <= 2
    assert len(window._done) <= 2
    assert len(window._watched) <= 2


def test_a_future_that_reports_after_its_batch_was_closed_leaves_nothing_behind() -> None:
    # A dependent task may see a result, and even end, before the callbacks of the result's future have run.
    executor = Executor({"generator": 2})
    quick = SimTask(executor, "generator", lambda args: 1.0, lambda *args: None)
    window = Window(pause=executor.advance)
    rollout, trained = quick.submit(REF, 0), quick.submit(REF, 0)
    window.open(0, trained, rollout=[rollout])
    (late,), rollout.callbacks = rollout.callbacks, []
    window.committed(0)
    late(rollout)
    assert window._done == set(), "the next future with this id would count as done"

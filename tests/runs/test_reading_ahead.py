"""The next batch is read while a step is taken; the result is as if it were not."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from forge_core.runs import consumption
from forge_core.runs.consumption import load_step
from forge_core.runs.initialise import initialise
from forge_core.runs.reading_ahead import ReadAhead
from forge_core.runs.refilling import refill
from forge_core.runs.stages import sample_shard, score_shard
from forge_core.runs.training import train_batch
from tests.runs.harness import advance, decided, make_batch, memory, new_run

Reads = list[tuple[str, str]]
AHEAD = "read-ahead"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """The shards of episodes that were read, and the thread that read them."""
    found: Reads = []
    read = consumption.read_episodes

    def noted(store: Any, prefix: str) -> Any:
        found.append((threading.current_thread().name, prefix.split("/", 2)[2]))
        return read(store, prefix)

    monkeypatch.setattr(consumption, "read_episodes", noted)
    return found


@pytest.mark.fast
def test_what_was_read_is_given_once_and_a_failure_is_nothing() -> None:
    ahead: ReadAhead[str] = ReadAhead()

    def fails() -> str:
        raise OSError("no network")

    assert ahead.take(1) is None
    for read, expected in ((lambda: "one", "one"), (lambda: None, None), (fails, None)):
        ahead.begin(1, read)
        assert ahead.take(2) is None, "another batch"
        assert ahead.take(1) == expected
        assert ahead.take(1) is None
    ahead.begin(1, lambda: "one")
    ahead.begin(2, lambda: "two")
    assert (ahead.take(1), ahead.take(2)) == (None, "two")


@pytest.mark.fast
def test_a_batch_is_read_once_however_often_it_is_begun_and_forgotten_at_the_end() -> None:
    ahead: ReadAhead[str] = ReadAhead()
    reads = []
    for _ in range(3):
        ahead.begin(1, lambda: reads.append("read") or "one")
    assert (ahead.take(1), reads) == ("one", ["read"])
    go = threading.Event()
    ahead.begin(2, lambda: "two" if go.wait(10) else None)
    go.set()
    ahead.close()
    assert ahead.take(2) is None


@pytest.mark.fast
def test_a_batch_that_is_still_being_read_is_waited_for() -> None:
    ahead: ReadAhead[str] = ReadAhead()
    go = threading.Event()
    ahead.begin(1, lambda: "one" if go.wait(10) else "late")
    threading.Timer(0.1, go.set).start()
    assert ahead.take(1) == "one"


@pytest.mark.engine
def test_a_batch_that_is_there_is_read_while_the_one_before_is_trained_on(reads: Reads) -> None:
    ctx = new_run(memory(), "max_staleness=1", "eval.prompts=0")
    initialise(ctx)
    make_batch(ctx, 0)
    make_batch(ctx, 1)
    train_batch(ctx, 0)
    train_batch(ctx, 1)
    threads = {prefix: thread for thread, prefix in reads}
    assert len(reads) == len(threads) == 4, "each shard once"
    assert {prefix.split("/")[1]: thread == AHEAD for prefix, thread in threads.items()} == {
        "00000000": False,
        "00000001": True,
    }


@pytest.mark.engine
@pytest.mark.parametrize("late", ["score", "all"])
def test_what_comes_later_is_read_when_it_is_needed(late: str, reads: Reads) -> None:
    ctx = new_run(memory(), "max_staleness=1", "eval.prompts=0")
    initialise(ctx)
    make_batch(ctx, 0)
    if late == "score":
        episodes = [sample_shard(ctx, 1, shard) for shard in range(2)]
        score_shard(ctx, episodes[0])
    train_batch(ctx, 0)
    if late == "score":
        score_shard(ctx, episodes[1])
    else:
        make_batch(ctx, 1)
    train_batch(ctx, 1)
    assert AHEAD not in {thread for thread, _ in reads}


@pytest.mark.engine
def test_a_batch_that_was_refilled_meanwhile_is_read_again() -> None:
    sparse = ("max_staleness=1", "eval.prompts=0", "filters.dynamic_sampling=true", "grpo.n_samples=2")
    ctx = new_run(memory(), *sparse)
    initialise(ctx)
    make_batch(ctx, 0)
    refill(ctx, 0)
    make_batch(ctx, 1)
    load_step(ctx, 0)  # begins to read batch 1
    assert ctx.ahead._thread is not None
    ctx.ahead._thread.join()
    (ahead,) = ctx.ahead._found
    assert len(ahead.plans) == 1
    refill(ctx, 1)
    assert len(ctx.rounds(1)) > 1
    data = load_step(ctx, 1)
    assert len(data.plans) == len(ctx.rounds(1))
    assert len(data.episodes) == sum(len(g["seeds"]) for plan in data.plans for g in plan["groups"])


@pytest.mark.engine
def test_a_run_is_the_same_whether_batches_are_read_ahead_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("max_staleness=1", "grpo.beta=0.1")
    expected = decided(advance(new_run(memory(), *settings), 4))
    monkeypatch.setattr(ReadAhead, "begin", lambda *_: None)
    assert decided(advance(new_run(memory(), *settings), 4)) == expected

"""Claims: one holder at a time, taken over when the holder is silent on the observer's own clock."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

from forge_core.runs.claims import Claims
from forge_core.runs.heartbeat import Heartbeat, Unchanged, read_heartbeat
from forge_core.store import Store, layout, open_store

RUN = "run"
SHARD = layout.claims(RUN, 3, 0, 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def beat(store: Store, name: str, number: int, *, ended: bool = False) -> None:
    store.put_json(layout.worker(RUN, name), {"beat": number, "ended": ended})


def claims(store: Store, name: str, clock: Clock) -> Claims:
    return Claims(store, RUN, name, timeout_s=60.0, clock=clock)


def test_of_many_generators_one_gets_a_shard_and_keeps_it():
    shared, clock = store(), Clock()
    barrier = threading.Barrier(16)

    def take(number: int) -> bool:
        barrier.wait()
        return claims(shared, f"generator-{number}", clock).take(SHARD)

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(take, range(16)))
    assert won.count(True) == 1
    winner = claims(shared, f"generator-{won.index(True)}", clock)
    assert winner.take(SHARD), "its own claim is its own, also when asked again"


def test_a_holder_that_beats_keeps_its_claim_and_a_silent_one_loses_it():
    shared, clock = store(), Clock()
    beat(shared, "a", 1)
    assert claims(shared, "a", clock).take(SHARD)
    other = claims(shared, "b", clock)
    for number in range(2, 6):
        beat(shared, "a", number)
        assert not other.take(SHARD)
        clock.now += 59.0
    assert not other.take(SHARD), "59 s after the last change"
    clock.now += 1.0
    assert other.take(SHARD)
    assert shared.read_json(layout.claim(SHARD, 1)) == {"worker": "b"}
    assert not claims(shared, "a", clock).take(SHARD), "the newest claim holds"


def test_a_holder_without_any_heartbeat_loses_its_claim_too():
    shared, clock = store(), Clock()
    assert claims(shared, "a", clock).take(SHARD)
    other = claims(shared, "b", clock)
    assert not other.take(SHARD)
    clock.now = 60.0
    assert other.take(SHARD)


def test_a_holder_that_says_it_ended_gives_its_claims_back_at_once():
    shared, clock = store(), Clock()
    beat(shared, "a", 7)
    assert claims(shared, "a", clock).take(SHARD)
    beat(shared, "a", 8, ended=True)
    assert claims(shared, "b", clock).take(SHARD)


def test_a_heartbeat_changes_while_it_is_open_and_says_when_it_ended():
    shared = store()
    with Heartbeat(shared, RUN, "scorer", "scorer-1", every_s=0.01) as heart:
        heart.doing("shard 3")
        heart.made()
        seen = set()
        for _ in range(1000):
            if found := read_heartbeat(shared, RUN, "scorer-1"):
                seen.add(found["beat"])
                if len(seen) > 2 and found["doing"] == "shard 3":
                    break
            threading.Event().wait(0.005)
        assert found is not None
        assert (found["role"], found["made"], found["ended"]) == ("scorer", 1, False)
    assert (last := read_heartbeat(shared, RUN, "scorer-1")) is not None
    assert last["ended"]


def test_ages_are_those_of_what_the_observer_saw():
    clock = Clock()
    unchanged = Unchanged(clock)
    assert unchanged.seconds("a", 1) == 0.0
    clock.now = 5.0
    assert (unchanged.seconds("a", 1), unchanged.seconds("b", 1)) == (5.0, 0.0)
    assert unchanged.seconds("a", None) == 0.0
    clock.now = 7.0
    assert unchanged.seconds("a", None) == 2.0

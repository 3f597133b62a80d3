"""Several scorers, or several reference workers, of one run share its shards; what one of them leaves another takes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flows.role_session import RoleSession
from forge_core.runs.claims import Claims
from forge_core.runs.frontier import Frontier
from forge_core.runs.shard_manifests import ShardManifests
from forge_core.store import Store, layout, open_store
from tests.roles.test_claims import RUN, Clock, beat

SHARDS = 4
TIMEOUT_S = 60.0
ROLES = ("unscored", "unreferenced")
PUBLISHED = {"unscored": layout.rewards, "unreferenced": layout.reference}


def sampled(dynamic: bool = False) -> SimpleNamespace:
    """A run whose only open batch has ``SHARDS`` sampled shards."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.put_new_json(layout.plan(RUN, 0, 0), {})
    for shard in range(SHARDS):
        store.publish(layout.episodes(RUN, 0, 0, shard), {"episodes.parquet": bytes([shard])}, request="sample")
    return SimpleNamespace(
        store=store,
        run_id=RUN,
        ledger=SimpleNamespace(head=lambda: 0),
        rounds=lambda batch: [{"round": 0, "shards": [[shard] for shard in range(SHARDS)]}],
        config=SimpleNamespace(
            steps=5,
            max_staleness=0,
            grpo=SimpleNamespace(beta=0.1),
            filters=SimpleNamespace(dynamic_sampling=dynamic),
        ),
    )


class Worker:
    """One process of a role, as far as it looks for work."""

    def __init__(self, run: SimpleNamespace, role: str, name: str, clock: Clock) -> None:
        self.store: Store = run.store
        self.name, self.role = name, role
        context: Any = SimpleNamespace(**vars(run), shards=ShardManifests(run.store, SHARDS))
        self.frontier = Frontier(context)
        self.session = object.__new__(RoleSession)
        self.session._running, self.session.run = [], SimpleNamespace(run_id=RUN)  # type: ignore[assignment]
        self.session.claims = Claims(run.store, RUN, name, timeout_s=TIMEOUT_S, clock=clock)
        beat(run.store, name, 1)

    def look(self) -> Any:
        due: Callable[[Claims], Iterator[Any]] = getattr(self.frontier, self.role)
        return self.session.claimed(due)

    def publish(self, work: Any) -> list[int]:
        whole = work.episodes if isinstance(work.episodes, list) else [work.episodes]
        for each in whole:
            prefix = PUBLISHED[self.role](RUN, each.batch, each.round, each.shard)
            self.store.publish(prefix, {"x.parquet": b"y"}, request="work")
        return [each.shard for each in whole]


@pytest.mark.parametrize("same_turn", [False, True])
@pytest.mark.parametrize("role", ROLES)
def test_two_workers_do_each_shard_once(role: str, same_turn: bool) -> None:
    run, clock = sampled(), Clock()
    turn = lambda name: Claims(run.store, RUN, name, timeout_s=TIMEOUT_S).turn % SHARDS
    other = next(name for name in "bcdefghijkl" if (turn(name) == turn("a")) is same_turn)
    workers = [Worker(run, role, name, clock) for name in ("a", other)]
    done: dict[str, list[int]] = {"a": [], other: []}
    for _ in range(SHARDS):
        for worker, work in [(worker, worker.look()) for worker in workers]:  # both look before one of them publishes
            done[worker.name] += worker.publish(work) if work else []
    assert sorted(done["a"] + done[other]) == list(range(SHARDS))
    assert len(done["a"]) == len(done[other]) == SHARDS // 2


@pytest.mark.parametrize("role", ROLES)
def test_one_worker_does_all_of_them(role: str) -> None:
    worker, done = Worker(sampled(), role, "a", Clock()), []
    while work := worker.look():
        done += worker.publish(work)
    assert sorted(done) == list(range(SHARDS))


@pytest.mark.parametrize("role", ROLES)
def test_what_a_dead_worker_held_is_done_by_another_after_the_timeout(role: str) -> None:
    run, clock = sampled(), Clock()
    dead = Worker(run, role, "a", clock)
    held, other, done = dead.look(), Worker(run, role, "b", clock), []
    while work := other.look():
        done += other.publish(work)
    assert sorted([*done, held.episodes.shard]) == list(range(SHARDS)), "all that the dead one does not hold"
    clock.now += TIMEOUT_S
    assert other.look() == held


@pytest.mark.parametrize("role", ROLES)
def test_what_a_worker_gave_back_is_free_at_once(role: str) -> None:
    run, clock = sampled(), Clock()
    held = Worker(run, role, "a", clock).look()
    beat(run.store, "a", 2, ended=True)
    other, done = Worker(run, role, "b", clock), []
    while work := other.look():
        done += other.publish(work)
    assert held.episodes.shard in done


def test_a_batch_that_may_be_refilled_is_one_workers_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frontier, "full", lambda self, batch: True)
    run, clock = sampled(dynamic=True), Clock()
    a, b = (Worker(run, "unreferenced", name, clock) for name in ("a", "b"))
    work = a.look()
    assert [each.shard for each in work.episodes] == list(range(SHARDS))
    a.store.publish(layout.reference(RUN, 0, 0, 0), {"x.parquet": b"y"}, request="work")  # the first of its shards
    assert b.look() is None
    clock.now += TIMEOUT_S
    assert [each.shard for each in b.look().episodes] == [1, 2, 3]

"""What a run and its store can do without goes; what the registry or a resume may need stays."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core.config import load_config
from forge_core.runs.garbage import LEFT_S, collect_garbage, collect_leftovers, collect_strays, registered_weights
from forge_core.runs.record import RunRecord, create_run, load_run
from forge_core.runs.versions import best_version, remember
from forge_core.store import Ledger, Store, layout
from forge_core.weights.registry import Registry
from tests.store.entries import RUN, committed, entry

GRACE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(memory: Store) -> Clock:
    clock = Clock()
    memory._backend.clock = clock  # type: ignore[attr-defined]  # that of the store
    return clock


def started(store: Store, steps: int = 6, **more: Any) -> RunRecord:
    settings = {**more, "run": {"id": RUN}, "steps": steps, "weights": {"keep": 1}, "gc": {"grace": GRACE_S}}
    return create_run(store, load_config({**settings, "rewards": {"functions": [{"path": "exact_match"}]}}))


def with_weights(store: Store, steps: int, **changes: Any) -> Ledger:
    """``steps`` committed steps, each with weights. ``changes``: metrics of single batches, as ``b3=...``."""
    ledger = committed(store, 0)
    for batch in range(steps):
        metrics = {**entry(batch, "")["metrics"], **changes.get(f"b{batch}", {})}
        ledger.commit(entry(batch, ledger.previous(batch), metrics=metrics))
    for version in range(steps + 1):
        store.publish(ledger.weights_prefix(version), {"model": bytes([version]) * 100}, request="r")
    return ledger


def left(store: Store) -> list[int]:
    return sorted({int(key.split("/")[3][:8]) for key in store.list(f"runs/{RUN}/weights")})


def collected(store: Store, record: RunRecord, clock: Clock) -> list[int]:
    """The versions that are left after two collections and the grace between them."""
    collect_garbage(store, record)
    clock.now += GRACE_S
    collect_garbage(store, record)
    return left(store)


def record_of(store: Store, ledger: Ledger, version: int) -> dict[str, Any]:
    prefix = ledger.weights_prefix(version)
    content = store.open_published(prefix).manifest.content
    unknown = dict.fromkeys(("promoted_at", "evaluation", "parent", "data", "replaced"))
    return {"weights": prefix, "weights_digest": content, "run_id": RUN, "version": version, **unknown}


def test_what_the_registry_stands_for_or_goes_back_to_stays(memory: Store, clock: Clock) -> None:
    record, ledger = started(memory), with_weights(memory, 6)
    registry = Registry(memory, "math")
    for version in (1, 2, 3):
        registry.promote(record_of(memory, ledger, version), "better")
    registry.register(record_of(memory, ledger, 4), "new")
    assert registered_weights(memory) == {ledger.weights_prefix(version) for version in (2, 3, 4)}
    assert collected(memory, record, clock) == [0, 2, 3, 4, 6]
    registry.rollback("worse after all")
    registry.promote(record_of(memory, ledger, 6), "best")
    assert collected(memory, record, clock) == [0, 2, 4, 6]


def test_the_best_evaluated_version_stays(memory: Store, clock: Clock) -> None:
    evaluated = {"b1": {"eval/reward/mean": 0.9, "eval/version": 1}, "b3": {"eval/reward/mean": 0.8, "eval/version": 3}}
    record = started(memory)
    with_weights(memory, 6, **evaluated)
    assert collected(memory, record, clock) == [0, 1, 6]


def test_the_best_version_may_be_the_one_before_the_last(memory: Store) -> None:
    """The last entry records the evaluations of two versions: the one that it trained and the one that it made."""
    both = {"eval/before/reward/mean": 0.9, "eval/before/version": 2, "eval/reward/mean": 0.7, "eval/version": 3}
    with_weights(memory, 3, b0={"eval/reward/mean": 0.8, "eval/version": 0}, b2=both)
    assert best_version(memory, RUN).version == 2


def reads(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    read = store.read

    def noted(key: str) -> bytes:
        seen.append(key)
        return read(key)

    monkeypatch.setattr(store, "read", noted)
    return seen


def test_the_best_version_is_looked_up_without_reading_the_whole_ledger_again(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = with_weights(memory, 30, b4={"eval/reward/mean": 0.5, "eval/version": 4})
    remember(memory, RUN, best_version(memory, RUN))
    for batch in (30, 31):
        better = {**entry(batch, "")["metrics"], "eval/reward/mean": 0.5 + batch, "eval/version": batch}
        ledger.commit(entry(batch, ledger.previous(batch), metrics=better))
    seen = reads(memory, monkeypatch)
    assert best_version(memory, RUN).version == 31
    assert seen == [layout.best(RUN), *(layout.ledger(RUN, batch) for batch in (29, 30, 31))]


@pytest.mark.parametrize("change", [{"entry": "of another ledger"}, {"steps": 9}])
def test_a_summary_of_another_ledger_is_not_used(memory: Store, change: dict[str, Any]) -> None:
    with_weights(memory, 6, b1={"eval/reward/mean": 0.5, "eval/version": 1})
    remember(memory, RUN, best_version(memory, RUN))
    memory.put_json(layout.best(RUN), {**memory.read_json(layout.best(RUN)), "version": 5, **change})
    assert best_version(memory, RUN).version == 1


def test_advice_about_the_past_goes_and_about_the_present_stays(memory: Store, clock: Clock) -> None:
    record = started(memory, steps=6)
    ledger = with_weights(memory, 3)
    for batch in (2, 3):
        memory.put_new_json(layout.claim(layout.claims(RUN, batch, 0, 0), 0), {"worker": "g"})
    for version in (2, 3):
        memory.put_new_json(layout.claim(layout.evaluation_claims(RUN, version, "digest"), 0), {"worker": "g"})
    for version in (3, 4):
        memory.put_new_json(layout.candidate(RUN, version, 0), {})
    memory.put_json(layout.worker(RUN, "generator-1"), {"beat": 1})
    advice = lambda: [k for kind in ("claims", "candidates", "workers") for k in memory.list(f"runs/{RUN}/{kind}")]
    assert len(advice()) == 7
    collect_garbage(memory, record, dry_run=True)
    assert len(advice()) == 7
    collect_garbage(memory, record)
    assert advice() == [
        layout.claim(layout.claims(RUN, 3, 0, 0), 0),
        layout.claim(layout.evaluation_claims(RUN, 3, "digest"), 0),
        layout.candidate(RUN, 4, 0),
        layout.worker(RUN, "generator-1"),
    ]
    for batch in (3, 4, 5):
        ledger.commit(entry(batch, ledger.previous(batch)))
    collect_garbage(memory, record)
    assert advice() == []


def test_claims_of_evaluations_stay_as_long_as_the_window_lasts(memory: Store) -> None:
    record = started(memory, max_staleness=2)
    with_weights(memory, 4)
    for version in (1, 2, 3):
        memory.put_new_json(layout.claim(layout.evaluation_claims(RUN, version, "digest"), 0), {"worker": "g"})
    collect_garbage(memory, record)
    left = [key.split("/")[3] for key in memory.list(f"runs/{RUN}/claims")]
    assert left == [f"evaluation-{version:08d}-digest" for version in (2, 3)]


def test_files_that_no_manifest_of_a_committed_batch_names_go_after_their_grace(memory: Store, clock: Clock) -> None:
    record = started(memory)
    with_weights(memory, 2)
    shards = [layout.episodes(RUN, batch, 0, 0) for batch in range(3)]
    for prefix in shards:
        memory.publish(prefix, {"episodes.parquet": b"winner"}, request="r")
        memory.upload(prefix, {"episodes.parquet": b"loser"})
    memory.upload(layout.rewards(RUN, 1, 0, 7), {"rewards.parquet": b"killed before its manifest"})
    assert collect_strays(memory, record) == ()
    clock.now += GRACE_S
    gone = collect_strays(memory, record)
    assert [(g.name, len(g.keys)) for g in gone] == [(p, 1) for p in (*shards[:2], layout.rewards(RUN, 1, 0, 7))]
    assert [len(memory.list(prefix)) for prefix in shards] == [2, 2, 3]
    assert all(memory.open_published(prefix).read("episodes.parquet") == b"winner" for prefix in shards)


def test_probes_of_killed_processes_go_after_a_day(memory: Store, clock: Clock) -> None:
    memory.put_new("probe/dead", b"first")
    clock.now += LEFT_S - 1
    memory.put_new("probe/alive", b"first")
    assert collect_leftovers(memory) == ()
    clock.now += 1
    assert [g.keys for g in collect_leftovers(memory, dry_run=True)] == [{"probe/dead": 5}]
    assert [g.keys for g in collect_leftovers(memory)] == [{"probe/dead": 5}]
    assert memory.list("probe") == ["probe/alive"]


def test_a_collection_leaves_a_run_that_still_resumes_and_is_found(memory: Store, clock: Clock) -> None:
    record, ledger = started(memory), with_weights(memory, 4)
    collected(memory, record, clock)
    assert load_run(memory, RUN).config == record.config
    assert Ledger(memory, RUN).verify() == ledger.head() == 4

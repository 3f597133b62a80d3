"""Processes that meet in the store alone make the run that one flow makes, whatever happens to them."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.server import ServerHandle
from forge_core.runs.heartbeat import read_heartbeat
from forge_core.store import Store, layout
from tests.faults.processes import Forge, write_config
from tests.faults.stored import Stored, check_complete, check_same_run
from tests.runs.harness import TINY

pytestmark = [pytest.mark.server, pytest.mark.engine]

STEPS = 6
CONFIG: dict[str, Any] = TINY | {
    "steps": STEPS,
    "max_staleness": 1,
    "grpo": {"n_samples": 4, "beta": 0.1},
    "roles": {"claim_timeout_s": 5, "wait_s": 120},
}
Start = Callable[..., Forge]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(*arguments)`` starts a ``forge`` process that ends with the test."""
    running: list[Forge] = []

    def started(*arguments: object, environment: Mapping[str, str] | None = None) -> Forge:
        running.append(Forge(tmp_path, *arguments, environment=environment))
        return running[-1]

    yield started
    for forge in running:
        forge.end()


@pytest.fixture(scope="module")
def one_flow(tmp_path_factory: pytest.TempPathFactory, prefect_server: ServerHandle) -> Stored:
    """The run as one flow makes it."""
    folder = tmp_path_factory.mktemp("one")
    forge = Forge(folder, "train", write_config(folder, CONFIG))
    assert forge.wait() == 0, forge.output
    return Stored(folder / "store")


def check_finished(store: Store, one_flow: Stored) -> None:
    run = Stored(store.uri)
    check_same_run(run, one_flow, STEPS)
    check_complete(run, STEPS, CONFIG["max_staleness"])


def create(start: Start, folder: Path, store: str) -> Store:
    forge = start("create", write_config(folder, CONFIG), "--store", store)
    assert forge.wait() == 0, forge.output
    return Stored(store).store


def claimed_by(store: Store, batch: int) -> set[str]:
    """The generators that claimed shards of ``batch``."""
    keys = store.list(f"{layout.run('tiny')}claims/{layout.number(batch)}/{layout.number(0)}")
    return {store.read_json(key)["worker"] for key in keys}


def test_roles_over_s3_in_any_order_make_the_run_of_one_flow_bit_for_bit(
    start: Start, tmp_path: Path, s3_store_uri: str, one_flow: Stored, prefect_server: ServerHandle
) -> None:
    """Each on a machine of its own, as far as folders go: no cache, home or temporary file is another's."""
    uri = f"{s3_store_uri}-roles"

    def role(name: str) -> Forge:
        machine = tmp_path / uuid.uuid4().hex
        places = ("FORGE_HOME", "PREFECT_HOME", "TMPDIR", "FORGE_WEIGHTS_CACHE")
        for place in places:
            (machine / place).mkdir(parents=True)
        own = {place: str(machine / place) for place in places}
        return start("role", name, "tiny", "--store", uri, environment=own | {"PREFECT_API_URL": prefect_server.url})

    early = [role(name) for name in ("scorer", "generator")]
    store = create(start, tmp_path, uri)
    late = [role(name) for name in ("trainer", "reference", "generator")]
    for forge in (*early, *late):
        assert forge.wait() == 0, forge.output
        assert forge.printed(r"\n(scorer|generator|trainer|reference): the run is finished\n"), forge.output
    assert early[0].printed(r"\nscorer: grades batch 0, shard 0\n"), early[0].output
    assert late[0].printed(r"\ntrainer: trains on batch 0\n"), late[0].output
    check_finished(store, one_flow)


def test_a_role_of_a_run_that_is_not_there_says_that_it_waits_for_it(start: Start, tmp_path: Path) -> None:
    ghost = start("role", "scorer", "gohst", "--store", tmp_path / "none")
    ghost.wait_until(lambda: ghost.printed(r"\nscorer: waiting for run gohst to be created in file://"))


def test_roles_that_are_killed_preempted_or_started_twice_change_nothing(
    start: Start, tmp_path: Path, one_flow: Stored
) -> None:
    store = create(start, tmp_path, str(tmp_path / "roles"))
    role = lambda name: start("role", name, "tiny", "--store", store.uri)
    others, first, trainer = [role("scorer"), role("reference")], role("generator"), role("trainer")
    run = Stored(store.uri)
    first.wait_until(lambda: claimed_by(store, 0))  # it is about to sample, or does
    (holder,) = claimed_by(store, 0)
    first.kill()
    second = role("generator")
    trainer.wait_until(lambda: run.ledger.head() >= 2)
    assert len(claimed_by(store, 0)) == 2 or run.store.published(layout.episodes("tiny", 0, 0, 1))
    trainer.kill()
    second.signal_group(signal.SIGTERM)
    assert second.wait(30) == 130, second.output
    assert "SIGTERM" in second.output
    ended = [read_heartbeat(store, "tiny", name) for name in claimed_by(store, 1) | claimed_by(store, 2) - {holder}]
    assert any(beat is not None and beat["ended"] for beat in ended), "its claims are given back"
    more = [role(name) for name in ("trainer", "trainer", "generator")]
    statuses = [forge.wait() for forge in more]
    for forge in others:
        assert forge.wait() == 0, forge.output
    assert statuses[2] == 0, more[2].output
    assert 0 in statuses[:2], more[0].output + more[1].output
    for status, forge in zip(statuses[:2], more[:2], strict=True):
        assert status == 0 or "one trainer per run" in forge.output, forge.output
    check_finished(store, one_flow)


def test_a_role_that_waits_for_nobody_gives_up_and_says_so(start: Start, tmp_path: Path, one_flow: Stored) -> None:
    values = CONFIG | {"roles": {"wait_s": 3}}
    created = start("create", write_config(tmp_path, values), "--store", tmp_path / "alone")
    assert created.wait() == 0, created.output
    lonely = start("role", "scorer", "tiny", "--store", tmp_path / "alone")
    assert lonely.wait() == 1
    assert lonely.printed(r"nothing to do and no training step .*roles.wait_s=3"), lonely.output

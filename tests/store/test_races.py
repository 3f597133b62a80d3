"""Of any number of racing writers exactly one wins, on every backend, in threads and in processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forge_core.store import Store, open_store

RACERS = 20

RACE_IN_A_PROCESS = """
import os, sys, time
from forge_core.store import open_store
uri, gate, racer, rounds = sys.argv[1:]
store = open_store(uri)
open(f"{gate}/ready-{racer}", "w").close()
while not os.path.exists(f"{gate}/go"):
    time.sleep(0.001)
print(" ".join(str(n) for n in range(int(rounds)) if store.put_new(f"race/{n}", racer.encode())))
"""


def rounds(store: Store) -> int:
    """The S3 server lets racers for one key wait for each other in steps of a second."""
    return 1 if store.uri.startswith("s3") else 20


def race(racer: Callable[[int], bool]) -> list[int]:
    """Start all racers at one moment; the numbers of those that won."""
    barrier = threading.Barrier(RACERS)

    def run(number: int) -> bool:
        barrier.wait()
        return racer(number)

    with ThreadPoolExecutor(RACERS) as pool:
        return [number for number, won in enumerate(pool.map(run, range(RACERS))) if won]


def test_one_of_twenty_threads_creates_a_key(store: Store) -> None:
    for attempt in range(rounds(store)):
        winners = race(lambda n, key=f"race/{attempt}": store.put_new(key, f"writer {n}".encode()))
        assert len(winners) == 1
        assert store.read(f"race/{attempt}") == f"writer {winners[0]}".encode()


def test_one_of_twenty_threads_wins_with_equal_bodies(store: Store) -> None:
    for attempt in range(rounds(store)):
        assert len(race(lambda n, key=f"bytes/{attempt}": store.put_new(key, b"the same"))) == 1


def test_all_publishers_of_one_object_return_the_same_manifest(store: Store) -> None:
    barrier = threading.Barrier(RACERS)

    def publish(number: int) -> str:
        barrier.wait()
        return store.publish("e/1", {"rows": f"by {number}".encode()}, request="r").content

    with ThreadPoolExecutor(RACERS) as pool:
        contents = set(pool.map(publish, range(RACERS)))
    assert contents == {store.open_published("e/1").manifest.content}
    assert store.open_published("e/1").read("rows").startswith(b"by ")


def test_creating_while_others_delete_the_last_key_of_a_folder(store: Store) -> None:
    def cycle(number: int) -> bool:
        for turn in range(10):
            assert store.put_new(f"folder/{number}", b"x"), turn
            store.delete(f"folder/{number}")
        return True

    assert len(race(cycle)) == RACERS
    assert store.list("") == []


def race_in_processes(uri: str, gate: Path, racers: int, rounds: int) -> list[str]:
    command = [sys.executable, "-c", RACE_IN_A_PROCESS, uri, str(gate)]
    processes = [
        subprocess.Popen([*command, str(n), str(rounds)], stdout=subprocess.PIPE, text=True) for n in range(racers)
    ]
    while len(list(gate.iterdir())) < racers and all(process.poll() is None for process in processes):
        pass
    (gate / "go").touch()
    won = [number for process in processes for number in process.communicate(timeout=60)[0].split()]
    assert all(process.returncode == 0 for process in processes)
    return won


@pytest.mark.server
@pytest.mark.parametrize(("scheme", "racers"), [("file", 10), ("s3", 3)])
def test_each_key_is_created_by_one_process(
    scheme: str, racers: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root = f"file://{tmp_path}" if scheme == "file" else request.getfixturevalue("s3_store_uri")
    gate = tmp_path / "gate"
    gate.mkdir()
    won = race_in_processes(f"{root}/{uuid.uuid4().hex}", gate, racers, rounds=6)
    assert sorted(won, key=int) == [str(n) for n in range(6)]


def test_many_threads_share_one_store(store: Store) -> None:
    def work(number: int) -> bool:
        store.publish(f"o/{number}", {"data": bytes([number]) * 1000}, request="r")
        return store.open_published(f"o/{number}").read("data") == bytes([number]) * 1000

    assert len(race(work)) == RACERS
    assert len(store.list("o")) == 2 * RACERS
    assert open_store(store.uri).published("o/7")

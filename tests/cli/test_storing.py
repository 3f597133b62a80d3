"""gc, rm, du and logs: what they say, delete and refuse, on stores that hold a run."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.following import follow
from forge_core.config import load_config
from forge_core.logs import engine_logs, run_logs
from forge_core.runs.heartbeat import Heartbeat
from forge_core.runs.record import Parent, create_run
from forge_core.store import Ledger, Store, layout, open_store
from forge_core.weights.registry import Registry
from tests.cli.conftest import FORGE, Forge
from tests.store.entries import RUN, committed
from tests.weights.objects import until


@pytest.fixture
def stored(folder: Path) -> Store:
    """``./forge-store`` with a run of 5 steps, 3 of them committed, weights of all versions, and no grace."""
    store = open_store("forge-store")
    new_run(store, RUN)
    ledger = committed(store, 3)
    for version in range(4):
        store.publish(ledger.weights_prefix(version), {"model.safetensors": bytes([version]) * 1000}, request="r")
    store.publish(layout.episodes(RUN, 0, 0, 0), {"episodes.parquet": b"x" * 50}, request="r")
    return store


def new_run(store: Store, name: str, parent: Parent | None = None, **settings: object) -> None:
    config = {"run": {"id": name}, "steps": 5, "max_staleness": 0, "weights": {"keep": 1}, "gc": {"grace": 0}}
    functions = {"rewards": {"functions": [{"path": "exact_match"}]}}
    create_run(store, load_config({**config, **functions, **settings}), parent)


def weights(store: Store) -> list[int]:
    return sorted({int(key.split("/")[3][:8]) for key in store.list(f"runs/{RUN}/weights")})


def test_gc_says_what_it_deletes_and_how_large_it_is(forge: Forge, stored: Store) -> None:
    said = forge("gc", "--dry-run")
    assert (said.status, weights(stored)) == (0, [0, 1, 2, 3])
    before = sum(stored.sizes("").values())
    done = forge("gc", RUN)
    assert (done.status, weights(stored)) == (0, [0, 3])
    freed = before - sum(size for key, size in stored.sizes("").items() if not key.endswith("gc/best.json"))
    for result, verb in ((said, "would delete"), (done, "deleted")):
        assert result.out.splitlines()[-1] == f"{verb} 4 objects, {freed / 1000:.3g} kB"
        assert all(f"| {Ledger(stored, RUN).weights_prefix(version)} " in result.out for version in (1, 2))
    assert forge("gc").out == "deleted 0 objects, 0 bytes\n"


def test_gc_says_what_waits_for_its_grace(forge: Forge, stored: Store) -> None:
    new_run(stored, "patient", gc={"grace": 3600})
    for key in stored.list(f"runs/{RUN}/"):
        if not key.endswith("run.json"):
            stored.put_new(key.replace(RUN, "patient"), stored.read(key).replace(RUN.encode(), b"patient"))
    result = forge("gc", "patient")
    assert result.out.startswith("deleted 0 objects, 0 bytes\n2 more are out of reach")


def test_gc_names_what_a_removal_has_left(forge: Forge, stored: Store) -> None:
    stored.put_new("runs/half/ledger/init.json", b"{}")
    result = forge("gc")
    assert (result.status, "half has no run.json: forge rm half" in result.err) == (0, True)
    assert forge("rm", "half", "--yes").status == 0
    assert stored.list("runs/half") == []


def test_rm_removes_a_run_and_its_logs_and_nothing_else(forge: Forge, stored: Store) -> None:
    new_run(stored, "other")
    (engine_logs(RUN, "trainer") / "trainer-0.log").write_text("x")
    result = forge("rm", RUN, "--yes")
    assert result.status == 0
    assert re.match(rf"removed {RUN}: \d+ objects, [\d.]+ kB \(unfinished: 3 of 5 steps\)", result.out)
    assert stored.folders("runs") == ["other"]
    assert not run_logs(RUN).exists()
    assert forge("rm", RUN, "--yes").status == 2


def test_rm_deletes_manifests_first_and_run_json_last(
    forge: Forge, stored: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = stored.list(f"runs/{RUN}")
    deleted: list[str] = []
    delete = Store.delete

    def noted(self: Store, key: str) -> None:
        deleted.append(key)
        delete(self, key)

    monkeypatch.setattr(Store, "delete", noted)
    forge("rm", RUN, "--yes")
    manifests = [key for key in keys if key.endswith("manifest.json")]
    assert set(deleted[: len(manifests)]) == set(manifests)
    assert deleted[-1] == layout.run_json(RUN)
    assert sorted(deleted) == keys


def test_a_removal_that_was_killed_is_repeated_by_its_command(
    forge: Forge, stored: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = Store.delete
    left = iter(range(6))

    def dying(self: Store, key: str) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        delete(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", dying)
        assert forge("rm", RUN, "--yes").status == 130
    assert stored.exists(layout.run_json(RUN))
    assert f"| {RUN} |" in forge("runs").out
    assert forge("rm", RUN, "--yes").status == 0
    assert stored.list("runs") == []


def register(store: Store) -> None:
    prefix = Ledger(store, RUN).weights_prefix(1)
    unknown = dict.fromkeys(("promoted_at", "evaluation", "parent", "data", "replaced"))
    content = store.open_published(prefix).manifest.content
    record = {"weights": prefix, "weights_digest": content, "run_id": RUN, "version": 1, **unknown}
    Registry(store, "math").promote(record, "it is good")


@pytest.mark.parametrize(
    ("refer", "reason"),
    [
        (register, "the registry stands for runs/run-1/weights/00000001-a0/"),
        (lambda s: new_run(s, "child", Parent("rescore", RUN, 0, RUN, 0)), "the run child was made from its episodes"),
        (lambda s: new_run(s, "next", model=f"run://{RUN}/3"), f"the run next begins with run://{RUN}/3"),
    ],
)
def test_rm_refuses_a_run_that_others_refer_to_unless_forced(
    forge: Forge, stored: Store, refer: Callable[[Store], None], reason: str
) -> None:
    refer(stored)
    result = forge("rm", RUN, "--yes")
    assert (result.status, reason in result.err, "--force" in result.err) == (2, True, True)
    assert stored.exists(layout.run_json(RUN))
    assert forge("rm", RUN, "--yes", "--force").status == 0
    assert stored.list(f"runs/{RUN}") == []


def test_rm_refuses_a_run_that_a_process_works_on(forge: Forge, stored: Store) -> None:
    with Heartbeat(stored, RUN, "trainer", "trainer-1", every_s=0.05):
        while not stored.list(f"runs/{RUN}/workers"):
            time.sleep(0.01)
        result = forge("rm", RUN, "--yes")
        assert (result.status, "(trainer, on " in result.err, f"forge stop {RUN}" in result.err) == (2, True, True)
        assert stored.exists(layout.run_json(RUN))
    assert forge("rm", RUN, "--yes").status == 0, "it has ended"


def test_parents_are_named_as_runs_record_them(stored: Store) -> None:
    new_run(stored, "child", Parent("rescore", RUN, 0, RUN, 0))
    assert stored.read_json(layout.run_json("child"))["parent"] == asdict(Parent("rescore", RUN, 0, RUN, 0))


def test_rm_does_not_remove_where_nobody_can_be_asked(
    forge: Forge, stored: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = forge("rm", RUN)
    assert (result.status, "--yes" in result.err) == (2, True)
    assert stored.exists(layout.run_json(RUN))


@pytest.mark.parametrize(("answer", "status"), [(b"n\n", 1), (b"\n", 1), (b"y\n", 0)])
def test_rm_asks_at_a_terminal(stored: Store, folder: Path, answer: bytes, status: int) -> None:
    keyboard, terminal = pty.openpty()
    process = subprocess.Popen([FORGE, "rm", RUN], cwd=folder, stdin=terminal, stdout=subprocess.PIPE)
    os.write(keyboard, answer)
    out = process.communicate(timeout=60)[0].decode()
    assert (process.returncode, f"remove {RUN}: " in out) == (status, True)
    assert stored.exists(layout.run_json(RUN)) == (status == 1)
    os.close(keyboard)
    os.close(terminal)


@pytest.mark.parametrize("argv", [("rm", "../x"), ("logs", "../x"), ("gc", "../x"), ("rm", "x"), ("gc", "x")])
def test_runs_that_cannot_be_are_bad_input(forge: Forge, stored: Store, argv: tuple[str, ...]) -> None:
    assert forge(*argv).status == 2


def test_du_adds_up(forge: Forge, stored: Store) -> None:
    register(stored)
    result = forge("du")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.out.splitlines() if "|" in line]
    found = {(row[0], row[1]): (int(row[2]), int(row[4])) for row in rows if row[-1].isdigit()}
    sizes = stored.sizes(f"runs/{RUN}/weights")
    assert found[RUN, "weights"] == (8, sum(sizes.values()))
    assert found[RUN, "episodes"][0] == 2
    assert found["(no run)", "models"][0] == 1
    everything = stored.sizes("")
    assert found["total", ""] == (len(everything), sum(everything.values()))


def test_logs_are_chosen_by_role(forge: Forge) -> None:
    (engine_logs("first", None) / "vllm-0.log").write_text("loading weights\n")
    (engine_logs("first", None) / "trainer-0.log").write_text("rank 0\n")
    result = forge("logs", "first", "--role", "generator")
    assert (result.status, "loading weights\n" in result.out, "rank 0" in result.out) == (0, True, False)
    assert {"loading weights", "rank 0"} <= set(forge("logs", "first").out.splitlines())
    missing = forge("logs", "first", "--role", "scorer")
    assert (missing.status, "there are some of generator, run, trainer" in missing.err) == (2, True)
    assert "the machine that worked on it" in forge("logs", "second").err


def test_a_line_that_is_written_while_the_lines_before_it_are_printed_is_followed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "vllm-0.log"
    log.write_text("one\n")
    printed: list[str] = []

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            printed.append(text)
            if text == "one\n":
                with log.open("a") as file:
                    file.write("two\n")
            return len(text)

    looks = iter([[log]] * 3)
    monkeypatch.setattr(sys, "stdout", Terminal())
    with pytest.raises(StopIteration):
        follow(lambda: next(looks))
    assert [text for text in printed if text in ("one\n", "two\n")] == ["one\n", "two\n"]


def test_logs_are_followed_through_a_rotation_until_ctrl_c(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_HOME", str(folder / "home"))
    log = engine_logs("first", "generator") / "vllm-0.log"
    log.write_text("one\n")
    command = [str(FORGE), "logs", "first", "--role", "generator", "--follow"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_ctrl_c
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"==> {log} <==\n"
    assert process.stdout.readline() == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    assert process.stdout.readline() == "two\n"
    os.truncate(log, 0)
    until(lambda: log.stat().st_size == 0)
    with log.open("a") as file:
        file.write("3\n")
    assert process.stdout.readline() == "3\n"
    (log.parent / "vllm-1.log").write_text("four\n")
    assert process.stdout.readline() == f"==> {log.with_name('vllm-1.log')} <==\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def _heed_ctrl_c() -> None:
    """A shell that runs tests in the background has them ignore it, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

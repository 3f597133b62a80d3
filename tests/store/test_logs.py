"""Logs lie by run and role, are bounded, and only their owner can read them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge_core import logs
from forge_core.logs import ProcessLog, engine_logs, log_files, roles, rotate, run_logs
from forge_core.processes import ChildGroup


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def say(message: str) -> None:
    logging.getLogger("forge").warning(message)


def test_a_process_logs_into_the_file_of_its_run_and_role_while_it_works_on_it() -> None:
    mine = ProcessLog("first", "scorer")
    say("graded 8")
    mine.close()
    say("of no run")
    (file,) = log_files("first", "scorer")
    assert file == run_logs("first") / f"scorer-{os.getpid()}.log"
    assert "WARNING forge: graded 8" in file.read_text()
    assert "of no run" not in file.read_text()


def test_a_line_of_prefect_says_of_which_task_it_is() -> None:
    mine = ProcessLog("first", "scorer")
    logging.getLogger("prefect.task_runs").warning("Finished", extra={"task_run_name": "score b=3 shard=0"})
    mine.close()
    (file,) = log_files("first", "scorer")
    assert "WARNING prefect.task_runs: score b=3 shard=0: Finished" in file.read_text()


def test_engines_logs_are_those_of_the_process_and_of_the_role_whose_work_they_do() -> None:
    for name in ("vllm-0.log", "trainer-0.log"):
        (engine_logs("first", None) / name).write_text("x")
    ProcessLog("first", "reference").close()
    names = {role: {path.name for path in log_files("first", role)} for role in roles("first")}
    assert names == {
        "run": {"vllm-0.log", "trainer-0.log"},
        "generator": {"vllm-0.log"},
        "trainer": {"trainer-0.log"},
        "reference": {f"reference-{os.getpid()}.log"},
    }


def test_nobody_else_can_read_logs(home: Path) -> None:
    engine_logs("first", "trainer")
    assert (home / "logs").stat().st_mode & 0o077 == 0


def test_a_childs_log_is_rotated_while_it_writes(tmp_path: Path) -> None:
    log = engine_logs("first", "generator") / "vllm-0.log"
    script = "import sys\nfor n in range(3000):\n  print(n, 'x' * 100, flush=True)\n  (n % 1000 == 999) and input()"
    read, write = os.pipe()
    child = ChildGroup("child", [sys.executable, "-c", f"import os; os.dup2({read}, 0)\n{script}"], log=log,
                       pass_fds=[read])  # fmt: skip
    os.close(read)
    for _ in range(3):
        while not log.read_text().count("\n") >= 1000:
            assert child.alive()
        rotate(log, limit=50_000)
        assert log.stat().st_size == 0
        os.write(write, b"\n")
    child.wait(10)
    child.kill()
    kept = [log.with_name(f"vllm-0.log.{number}") for number in (3, 2, 1)]
    numbers = [int(line.split()[0]) for path in kept for line in path.read_text().splitlines()]
    assert numbers == list(range(3000))


def test_rotation_keeps_few_parts_and_leaves_short_logs_alone() -> None:
    log = engine_logs("first", "generator") / "vllm-0.log"
    for number in range(logs.BACKUPS + 3):
        log.write_text(f"{number}" * 100)
        rotate(log, limit=1000)
        assert log.exists()
        rotate(log, limit=10)
    assert sorted(path.name for path in log.parent.iterdir()) == [
        "vllm-0.log", *(f"vllm-0.log.{n + 1}" for n in range(logs.BACKUPS))
    ]  # fmt: skip
    assert (log.parent / "vllm-0.log.1").read_text().startswith(f"{logs.BACKUPS + 2}")


def test_only_the_newest_processes_of_a_role_keep_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "KEEP", 3)
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = 2**22 + 1  # above every pid
    folder = run_logs("first")
    folder.mkdir(parents=True)
    for age, pid in enumerate([alive.pid, *range(gone, gone + 4)]):
        file = folder / f"trainer-{pid}.log"
        file.write_text("x")
        (folder / f"trainer-{pid}").mkdir()
        for path in (file, folder / f"trainer-{pid}"):
            os.utime(path, (1e9 + age, 1e9 + age))
    (folder / f"scorer-{gone}.log").write_text("another role")
    ProcessLog("first", "trainer").close()
    alive.communicate(b"\n")
    left = {path.name for path in folder.iterdir()}
    pids = {alive.pid, gone + 2, gone + 3}
    assert left == {f"scorer-{gone}.log", f"trainer-{os.getpid()}.log"} | {
        f"trainer-{pid}{end}" for pid in pids for end in ("", ".log")
    }


def test_a_home_that_cannot_be_written_ends_nothing(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text("a file")
    ProcessLog("first", "trainer").close()
    assert "set FORGE_HOME" in caplog.text

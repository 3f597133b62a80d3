"""Child groups: nothing survives its owner, whatever kills it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from forge_core.processes import ChildGroup

# A child that starts a grandchild in a session of its own, as launchers do, and reports both pids.
FAMILY = """
import subprocess, sys, time, os
g = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1] + ".tmp", "w").write(f"{os.getpid()} {g.pid}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
print("family is up", flush=True)
time.sleep(600)
"""


def start(folder: Path) -> ChildGroup:
    return ChildGroup("family", [sys.executable, "-c", FAMILY, str(folder / "pids")], log=folder / "log")


def pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while not (folder / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(word) for word in (folder / "pids").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(numbers: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(runs(number) for number in numbers):
        assert time.monotonic() < deadline, [number for number in numbers if runs(number)]
        time.sleep(0.02)


def test_kill_ends_grandchildren_in_other_sessions(tmp_path: Path) -> None:
    group = start(tmp_path)
    family = pids(tmp_path)
    assert family[0] == group.pid
    assert os.getsid(group.pid) != os.getsid(0)
    group.kill()
    assert_gone(family)
    assert not group.alive()
    group.kill()


def test_a_killed_owner_leaves_nothing_behind(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.processes.test_group import start
group = start(Path({str(tmp_path)!r}))
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code])
    family = pids(tmp_path)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert_gone(family)


@pytest.mark.parametrize("victim", ["command", "guard"])
def test_a_killed_member_takes_the_rest_along(tmp_path: Path, victim: str) -> None:
    group = start(tmp_path)
    family = pids(tmp_path)
    os.kill(group.pid if victim == "command" else group._guard.pid, signal.SIGKILL)
    group.wait(10)
    assert_gone(family[:1])
    if victim == "command":
        assert group.poll() == 128 + signal.SIGKILL
        assert_gone(family)
    else:
        psutil.Process(family[1]).kill()
    group.kill()


def test_exit_status_log_and_environment(tmp_path: Path) -> None:
    os.environ["FORGE_TEST_REMOVED"] = "x"
    code = "import os, sys; print(os.environ['A'], os.environ.get('FORGE_TEST_REMOVED')); sys.exit(7)"
    env = {"A": "b", "FORGE_TEST_REMOVED": None}
    group = ChildGroup("short", [sys.executable, "-c", code], log=tmp_path / "deep" / "log", env=env)
    assert group.wait(20) == 7
    assert group.tail() == "b None"
    group.kill()


def test_terminate_lets_the_command_end_in_order(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('bye'), sys.exit(3))); "
    group = ChildGroup(
        "polite", [sys.executable, "-c", code + "print('up', flush=True); time.sleep(600)"], log=tmp_path / "log"
    )
    while "up" not in group.tail():
        time.sleep(0.02)
    group.terminate(10.0)
    assert (group.poll(), group.tail()) == (3, "up\nbye")


def test_inherited_descriptors_reach_the_command(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    code = f"import os; os.write({theirs}, b'hello')"
    group = ChildGroup("talker", [sys.executable, "-c", code], log=tmp_path / "log", pass_fds=[theirs])
    os.close(theirs)
    assert os.read(ours, 10) == b"hello"
    assert os.read(ours, 10) == b""  # nobody else holds the write end
    os.close(ours)
    group.kill()


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-program"):
        ChildGroup("missing", ["no-such-program"], log=tmp_path / "log")

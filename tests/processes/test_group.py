"""Child groups: nothing survives its owner, whatever kills it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from forge_core.processes import ChildGroup, guard

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


def words_of(folder: Path) -> list[str]:
    """What the command has written once it is up."""
    deadline = time.monotonic() + 20
    while not (folder / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return (folder / "pids").read_text().split()


def pids(folder: Path) -> list[int]:
    return [int(word) for word in words_of(folder)]


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
    assert group.poll() == 128 + signal.SIGKILL
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


# A child and its grandchild that share memory with each other, and with whoever holds the segment "outside".
SHARING = """
import multiprocessing as mp, os, sys, time
from multiprocessing.shared_memory import SharedMemory

def attach(names):
    kept = [SharedMemory(name, track=False) if sys.version_info >= (3, 13) else SharedMemory(name) for name in names]
    time.sleep(600)

if __name__ == "__main__":
    own, lock = SharedMemory(create=True, size=1000), mp.get_context("spawn").Lock()
    outside = SharedMemory(sys.argv[2])
    child = mp.get_context("spawn").Process(target=attach, args=([own.name],))
    child.start()
    while own.name not in open(f"/proc/{child.pid}/maps").read():
        time.sleep(0.02)
    with open(sys.argv[1] + ".tmp", "w") as file:
        file.write(f"{os.getpid()} {child.pid} {own.name} sem.{lock._semlock.name[1:]}")
    os.rename(sys.argv[1] + ".tmp", sys.argv[1])
    time.sleep(600)
"""


def test_shared_memory_of_the_dead_is_removed_and_that_of_the_living_is_not(tmp_path: Path) -> None:
    (tmp_path / "sharing.py").write_text(SHARING)
    outside = SharedMemory(create=True, size=1000)
    command = [sys.executable, str(tmp_path / "sharing.py"), str(tmp_path / "pids"), outside.name]
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from forge_core.processes import ChildGroup, guard
group = ChildGroup("sharing", {command!r}, log=Path({str(tmp_path / "log")!r}))
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code])
    try:
        words = words_of(tmp_path)
        segments = [Path("/dev/shm") / name for name in words[2:]]
        assert all(path.exists() for path in segments)
        owner.kill()
        owner.wait()
        assert_gone([int(word) for word in words[:2]])
        deadline = time.monotonic() + 5
        while any(path.exists() for path in segments):
            assert time.monotonic() < deadline, segments
            time.sleep(0.02)
        assert Path("/dev/shm", outside.name).exists()
    finally:
        owner.kill()
        outside.close()
        outside.unlink()


# Names a semaphore and ends at once, before anyone has looked at what it had mapped; its tracker is slow.
BRIEF = """
import multiprocessing as mp, os, signal, sys
from multiprocessing import resource_tracker

lock = mp.get_context("spawn").Lock()
os.kill(resource_tracker._resource_tracker._pid, signal.SIGSTOP)
with open(sys.argv[1] + ".tmp", "w") as file:
    file.write(f"{resource_tracker._resource_tracker._pid} sem.{lock._semlock.name[1:]}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
os._exit(0)
"""


def test_what_was_dead_before_anyone_looked_leaves_no_shared_memory(tmp_path: Path) -> None:
    group = ChildGroup("brief", [sys.executable, "-c", BRIEF, str(tmp_path / "pids")], log=tmp_path / "log")
    tracker, semaphore = words_of(tmp_path)
    time.sleep(0.5)
    os.kill(int(tracker), signal.SIGCONT)
    assert group.wait(10) == 0
    assert not Path("/dev/shm", semaphore).exists()
    assert_gone([int(tracker)])
    group.kill()


def test_a_tracker_that_does_not_end_is_killed(tmp_path: Path) -> None:
    group = ChildGroup("brief", [sys.executable, "-c", BRIEF, str(tmp_path / "pids")], log=tmp_path / "log")
    tracker, semaphore = words_of(tmp_path)
    assert group.wait(10) == 0
    assert_gone([int(tracker)])
    group.kill()
    Path("/dev/shm", semaphore).unlink()


def test_exit_status_log_and_environment(tmp_path: Path) -> None:
    os.environ["FORGE_TEST_REMOVED"] = "x"
    code = "import os, sys; print(os.environ['A'], os.environ.get('FORGE_TEST_REMOVED')); sys.exit(7)"
    env = {"A": "b", "FORGE_TEST_REMOVED": None}
    group = ChildGroup("short", [sys.executable, "-c", code], log=tmp_path / "deep" / "log", env=env)
    assert group.wait(20) == 7
    assert group.tail() == "b None"
    group.kill()


def test_errors_are_those_of_this_start_each_once(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("OSError: of an earlier start\n")
    code = (
        "print('(Worker pid=1) ERROR 11-28 [x.py:1] ValueError: too little memory')\n"
        "print('ERROR ValueError: too little memory')\nraise RuntimeError('see above')"
    )
    group = ChildGroup("failing", [sys.executable, "-c", code], log=tmp_path / "log")
    assert group.wait(20) == 1
    assert group.errors() == ["ValueError: too little memory", "RuntimeError: see above"]
    assert group.errors(1) == ["RuntimeError: see above"]
    group.kill()


def test_terminate_lets_the_command_end_in_order(tmp_path: Path) -> None:
    code = (  # no print: the signal may come while one is not over
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'bye'), sys.exit(3))); "
        "os.write(1, b'up\\n'); time.sleep(600)"
    )
    group = ChildGroup("polite", [sys.executable, "-c", code], log=tmp_path / "log")
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


def test_a_process_that_has_ended_has_no_memory_before_anybody_has_waited_for_it() -> None:
    """A command that is dying looks alive to ``poll``, and what it had mapped cannot be read any more."""
    child = subprocess.Popen(["sleep", "60"])
    assert guard.has_memory(child.pid)
    child.kill()
    deadline = time.monotonic() + 5
    while guard.has_memory(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path(f"/proc/{child.pid}").exists()  # nobody has waited
    assert not guard.has_memory(child.pid)
    child.wait()
    assert not guard.has_memory(child.pid)

"""Run one command and end everything it started when it ends, or when the process that asked for it is gone.

    python guard.py LIFE_FD REPORT_FD COMMAND...

LIFE_FD is the read end of a pipe whose write end only the owner holds: end of file means that the owner has closed it
or has died, whatever killed it. REPORT_FD receives the pid of the command. Descendants in other sessions or process
groups are found too: this process is their subreaper. Shared memory that they had mapped, and that no living process
maps, is removed after them, and so is the folder of their temporary files: killed processes cannot do it. Of a command
that was dead or dying before its maps were read, Python's tracker knows the names; it is killed with the others
otherwise, since it removes what outsiders made too. What torch compiles stays, for the next start. Standard library
only, and nothing of Forge, so that it starts in milliseconds and cannot break with it. Linux; elsewhere descendants
that leave the process group are not found.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = "/dev/shm/"
TEMPORARY = (
    "psm_",
    "sem.",
    "nccl-",
    "torch_",
)  # of Python, vLLM's queues, semaphores, NCCL and torch: made to be shared
LOOK_S = 5.0  # between two looks at what is mapped: whoever is killed alone takes its maps along
TRACKERS_S = 2.0  # in which a tracker has removed what its dead had named: milliseconds


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def descendants(own: int) -> list[int]:
    tree, open_ = [], children(own)
    while open_:
        tree.append(open_.pop())
        open_ += children(tree[-1])
    return tree


def mapped(pids: list[int]) -> set[tuple[str, int]]:
    """Shared memory that these processes have mapped, by device and inode: a semaphore is mapped before it is named."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                if SHARED_MEMORY in line:
                    _, _, _, device, inode, *_ = line.split()
                    found.add((device, int(inode)))
    return found


def has_memory(pid: int) -> bool:
    """Whether the process has any: one that ends has none for a while before anybody can wait for it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        return bool(file.readline())
    return False


def shared_files() -> dict[tuple[str, int], str]:
    """Temporary shared memory of this machine: device and inode to path."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY):
                stat = entry.stat(follow_symlinks=False)
                device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
                found[device, stat.st_ino] = entry.path
    return found


def remove_unmapped(memory: set[tuple[str, int]]) -> None:
    """Remove what no living process maps."""
    files = shared_files() if memory else {}
    living = mapped([int(name) for name in os.listdir("/proc") if name.isdigit()]) if files else set()
    for key in memory & files.keys() - living:
        with contextlib.suppress(OSError):  # its owner was first
            os.unlink(files[key])


def is_tracker(pid: int) -> bool:
    """Whether it is the process that removes what a Python process named, once that one has died."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"multiprocessing.resource_tracker" in file.read()
    return False


def kill_descendants(own: int, trackers_s: float) -> dict[int, int]:
    """Stop first, so that nothing starts a process while it is being ended; then kill, and reap what comes back: pid to
    exit status, negative for a signal. Python's trackers may end by themselves for ``trackers_s`` seconds."""
    statuses: dict[int, int] = {}
    now = time.monotonic()
    spare, deadline = now + trackers_s, now + 10.0
    while (tree := descendants(own)) and time.monotonic() < deadline:
        ending = [pid for pid in tree if time.monotonic() > spare or not is_tracker(pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in ending:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[reaped[0]] = os.waitstatus_to_exitcode(reaped[1])
        time.sleep(0.02)
    return statuses


def main() -> int:
    life, report = int(sys.argv[1]), int(sys.argv[2])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the owner decides

    def in_child() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should this process be killed

    keep = [int(fd) for fd in os.environ.pop("FORGE_PASS_FDS", "").split(",") if fd]
    child = subprocess.Popen(sys.argv[3:], preexec_fn=in_child, start_new_session=True, pass_fds=keep)
    for fd in keep:
        os.close(fd)
    os.write(report, f"{child.pid}\n".encode())
    os.close(report)
    own, looked = os.getpid(), time.monotonic()
    shared: set[tuple[str, int]] = set()
    while child.poll() is None and not select.select([life], [], [], 0.1)[0]:
        if time.monotonic() > looked + LOOK_S:
            shared, looked = shared | mapped(descendants(own)), time.monotonic()
    shared |= mapped(descendants(own))
    were_read = has_memory(child.pid)
    status = child.poll()
    statuses = kill_descendants(own, 0.0 if were_read else TRACKERS_S)
    remove_unmapped(shared)
    status = statuses.get(child.pid, -signal.SIGKILL) if status is None else status
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    )
    with tempfile.TemporaryDirectory(prefix="forge-", ignore_cleanup_errors=True) as scratch:
        os.environ["TMPDIR"] = scratch
        status = main()
    os._exit(status)

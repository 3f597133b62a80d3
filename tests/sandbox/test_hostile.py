"""Programs that mean harm: each ends in bounded time, leaves no process and no file, and learns nothing of the host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sandbox.conftest import Attacker, processes_of

pytestmark = pytest.mark.server

MARK = "SECRET-" + os.urandom(8).hex()


def test_a_fork_bomb_ends_with_its_time(attack: Attacker) -> None:
    result = attack("while True:\n    try: os.fork()\n    except OSError: pass", timeout=1.0)
    assert result.timed_out
    assert result.exit_status == 137


def test_forks_that_fail_are_an_error_of_the_program(attack: Attacker) -> None:
    result = attack("import time\nwhile os.fork(): pass\ntime.sleep(60)")
    assert "BlockingIOError" in result.stderr
    assert result.exit_status == 1


def test_threads_are_counted_like_processes(attack: Attacker) -> None:
    code = """
import threading, time
threading.stack_size(2**18)
started = 0
try:
    while started < 100:
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
        started += 1
except RuntimeError:
    print(started, flush=True)
    os._exit(0)
"""
    assert 8 < int(attack(code).stdout) < 16


@pytest.mark.parametrize(
    "code",
    [
        "bytearray(10**12)",
        "x = [0]\nwhile True: x += x",
        "import mmap\nx = [mmap.mmap(-1, 2**24) for _ in range(100)]",
    ],
)
def test_a_memory_bomb_of_one_process_is_a_memory_error(attack: Attacker, code: str) -> None:
    result = attack(code)
    assert result.memory_exceeded or "Cannot allocate memory" in result.stderr
    assert result.exit_status == 1


def test_memory_of_all_processes_together_is_limited(attack: Attacker) -> None:
    code = "import time\nfor _ in range(6):\n    if not os.fork(): break\nx = os.urandom(60 * 2**20)\ntime.sleep(30)"
    result = attack(code)
    assert result.memory_exceeded
    assert result.exit_status == 137


def test_memory_that_is_no_process_of_its_own_cannot_be_had(attack: Attacker) -> None:
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, arguments in (("memfd_create", (b"x", 0)), ("shmget", (0, 4096, 0o1600)), ("msgget", (0, 0o1600))):
    print(name, getattr(libc, name)(*arguments), errno.errorcode[ctypes.get_errno()])
"""
    assert attack(code).stdout == "memfd_create -1 EPERM\nshmget -1 EPERM\nmsgget -1 EPERM\n"


SOCKETS = """
import socket, time
pairs = []
try:
    for _ in range({count}):
        pairs.append(socket.socketpair())
        for end in pairs[-1]:
            end.setblocking(False)
            for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                try: end.setsockopt(socket.SOL_SOCKET, size, 10**7)
                except PermissionError: pass
            try:
                while True: end.send(bytes(32768))
            except BlockingIOError: pass
except OSError: pass
print(len(pairs), flush=True)
"""


def test_memory_in_sockets_counts_too(attack: Attacker) -> None:
    result = attack("for _ in range(12):\n    if not os.fork(): break\n" + SOCKETS.format(count=100) + "time.sleep(5)")
    assert result.memory_exceeded
    assert result.duration_s < 2.0
    assert attack(SOCKETS.format(count=50)).stdout == "50\n"
    larger = "import socket\nsocket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_{}, 10**7)"
    assert all("PermissionError" in attack(larger.format(size)).stderr for size in ("SNDBUF", "RCVBUF"))


@pytest.mark.parametrize("stream", [1, 2])
def test_a_flood_of_output_ends_at_its_limit(attack: Attacker, stream: int) -> None:
    result = attack(f"while True: os.write({stream}, b'x' * 65536)")
    assert result.output_exceeded
    assert len((result.stdout, result.stderr)[stream - 1]) <= 2**20
    assert result.duration_s < 3.0


def test_files_are_limited_in_size_in_sum_and_in_number(attack: Attacker) -> None:
    code = """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def fill(path):
    try:
        with open(path, "wb") as file:
            while True: file.write(bytes(2**16))
    except OSError as error:
        return os.path.getsize(path), error.errno
print(fill("/tmp/0"))
print(sum(fill(f"/tmp/{n}")[0] for n in range(10)) // 2**20)
"""
    one, together = attack(code).stdout.splitlines()
    assert one == f"({4 * 2**20}, 27)"  # EFBIG
    assert int(together) < 16
    assert attack("for n in range(10**7): open(f'/tmp/{n}', 'w').close()").files_exceeded


def test_secrets_of_the_environment_and_of_files_are_not_there(
    attack: Attacker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_TEST_TOKEN", MARK)
    for folder in (tmp_path, Path.home(), Path("/var/tmp")):
        (folder / "forge-test-secret").write_text(MARK)
    code = f"""
import re
places = [{str(tmp_path)!r}, {str(Path.home())!r}, "/var/tmp", "/proc/1/root/var/tmp", "/proc/self/cwd/../var/tmp"]
for place in places:
    try: print(open(place + "/forge-test-secret").read())
    except OSError: pass
for parent, _, names in os.walk("/"):
    if parent.startswith(("/python", "/libs", "/proc/sys", "/proc/self/task")): continue
    for name in names:
        try:
            with open(os.path.join(parent, name), "rb", buffering=0) as file:
                os.set_blocking(file.fileno(), False)
                if found := re.search(rb"SECRET-[0-9a-f]+", file.read(100_000) or b""): print(parent, name, found[0])
        except OSError: pass
print(sorted(os.environ))
print(sorted(os.listdir("/")))
"""
    try:
        result = attack(code)
    finally:
        for folder in (Path.home(), Path("/var/tmp")):
            (folder / "forge-test-secret").unlink()
    assert MARK not in result.stdout + result.stderr
    assert result.ok, result.stderr
    assert result.stdout.splitlines() == [
        "['HOME', 'LANG', 'LD_LIBRARY_PATH', 'MALLOC_ARENA_MAX', 'PATH', 'PWD', 'PYTHONHASHSEED']",
        "['dev', 'files.json', 'forge', 'lib64', 'libs', 'proc', 'python', 'tmp']",
    ]


def test_nothing_outside_of_tmp_can_be_written(attack: Attacker, tmp_path: Path) -> None:
    code = f"""
wrote = []
for place in ("/", "/dev", "/dev/pts", "/python", "/python/bin/python3", "/forge/boot.py", "/proc/sys/kernel/hostname",
              "/proc/sysrq-trigger", "/etc", "/root", "/home", "/usr", {str(tmp_path)!r}):
    for path in (place, place + "/forge-test-file"):
        try:
            with open(path, "w") as file: file.write("0")
            wrote.append(path)
        except OSError: pass
print(wrote)
open("/tmp/forge-test-file", "w").close()
"""
    assert attack(code).stdout == "[]\n"
    assert not [path for path in ("/forge-test-file", "/tmp/forge-test-file") if Path(path).exists()]
    assert list(tmp_path.iterdir()) == []


def test_links_lead_nowhere_on_the_host(attack: Attacker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(MARK)
    code = f"""
for number, target in enumerate(({str(tmp_path / "file")!r}, "../../../../../etc/passwd", "/proc/1/root/etc/passwd",
                                 "/proc/1/cwd/etc/passwd", "/proc/self/fd/../../../etc/hostname", "/etc/shadow")):
    link = f"/tmp/{{number}}"
    os.symlink(target, link)
    try: print(open(link).read())
    except OSError as error: print(type(error).__name__)
try: os.link("/python/bin/python3", "/tmp/hard")
except OSError as error: print(type(error).__name__)
try: os.mknod("/tmp/disk", 0o60666, os.makedev(254, 0))
except OSError as error: print(type(error).__name__)
"""
    *links, hard, device = attack(code).stdout.splitlines()
    assert set(links) <= {"FileNotFoundError", "PermissionError"}
    assert len(links) == 6
    assert (hard, device) == ("OSError", "PermissionError")


def test_other_processes_cannot_be_seen_or_signalled(attack: Attacker) -> None:
    child = subprocess.Popen(["sleep", "60"])
    code = f"""
print([name for name in os.listdir("/proc") if name.isdigit()], os.getpid(), os.getppid())
print(open("/proc/1/environ").read() == open("/proc/self/environ").read())
for pid in (1, {os.getpid()}, {child.pid}):
    try: print(os.kill(pid, 9))
    except OSError as error: print(type(error).__name__)
"""
    lines = attack(code).stdout.splitlines()
    assert lines[:3] == ["['1', '2'] 2 1", "True", "None"]  # a signal to its own process 1 is sent, and has no effect
    assert lines[3:] == ["ProcessLookupError"] * 2
    assert child.poll() is None
    child.kill()
    child.wait()


@pytest.mark.parametrize(
    "code",
    [
        "os.kill(os.getppid(), 9)",
        "os.kill(-1, 9)",
        "os.killpg(0, 9)",
        "with open('/proc/1/mem', 'r+b', 0) as file:\n    while True: file.seek(4096 * 1024); file.write(bytes(4096))",
    ],
)
def test_killing_what_watches_it_ends_nothing_but_the_program(attack: Attacker, code: str) -> None:
    result = attack(code + "\nprint('still here')", timeout=3.0)
    assert not result.timed_out
    assert result.exit_status in (0, 1, 137)


def test_there_is_no_network(attack: Attacker) -> None:
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind("\0forge-test-" + MARK)
        unix.listen()
        code = f"""
import socket, ssl, asyncio
for family in ("INET", "INET6", "NETLINK", "PACKET", "VSOCK"):
    try: socket.socket(getattr(socket, "AF_" + family)); print("made", family)
    except OSError as error: print(error.errno)
try: socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), timeout=1); print("connected")
except OSError as error: print(error.errno)
try: socket.socket(socket.AF_UNIX).connect("\\0forge-test-{MARK}"); print("connected")
except OSError as error: print(error.errno)
print(os.listdir("/sys/class/net") if os.path.exists("/sys") else [line.split(":")[0].strip()
      for line in open("/proc/net/dev").readlines()[2:]])
asyncio.run(asyncio.sleep(0))  # pairs of sockets are for everybody
"""
        result = attack(code)
    assert result.ok, result.stderr
    assert result.stdout.splitlines() == ["1"] * 6 + ["111", "['lo']"]


def test_no_right_can_be_gained(attack: Attacker) -> None:
    code = """
import ctypes, errno, resource
libc = ctypes.CDLL(None, use_errno=True)
def failure(name, *arguments):
    result = getattr(libc, name)(*arguments)
    return result if result >= 0 else errno.errorcode[ctypes.get_errno()]
print(failure("unshare", 0x10000000), failure("setns", 0, 0), failure("mount", b"none", b"/tmp", b"tmpfs", 0, None),
      failure("chroot", b"/tmp"), failure("ptrace", 16, 1, 0, 0), failure("syscall", 425, 1, None),
      failure("syscall", 435, None, 0), failure("setuid", 0), failure("personality", 0xffffffff))
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print({name: status[name].strip().strip("0") for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")},
      status["NoNewPrivs"].strip(), status["Seccomp"].strip())
for name in ("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CPU"):
    try: resource.setrlimit(getattr(resource, name), (-1, -1)); print("raised")
    except ValueError: pass
"""
    calls, rights = attack(code).stdout.splitlines()
    assert calls == "EPERM EPERM EPERM EPERM EPERM EPERM ENOSYS EINVAL 0"
    assert rights == str(dict.fromkeys(("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"), "")) + " 1 2"


def test_signals_that_are_ignored_do_not_help(attack: Attacker) -> None:
    code = """
import signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
while True: pass
"""
    assert attack(code, timeout=1.0).timed_out


@pytest.mark.parametrize("keep_output_open", [True, False])
def test_processes_left_in_the_background_end_with_the_program(attack: Attacker, keep_output_open: bool) -> None:
    code = f"""
import time
if not os.fork():
    os.setsid()
    if os.fork(): os._exit(0)
    if not {keep_output_open}: os.closerange(0, 64)
    time.sleep(600)
print("gone")
"""
    result = attack(code)
    assert result.stdout == "gone\n"
    assert result.ok
    assert result.duration_s < 3.0


def test_recursion_without_an_end_ends(attack: Attacker) -> None:
    endless = "def f(n): return f(n + 1)\n"
    assert "RecursionError" in attack(endless + "f(0)").stderr
    deep = "import sys; sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nprint(len(repr(x)))"
    assert attack(deep, timeout=3.0).exit_status in (1, 137, 139)


def test_integers_of_any_size_end_with_their_time(attack: Attacker) -> None:
    result = attack("print(len(str(3 ** (10 ** 9))))", timeout=1.0)
    assert result.exit_status == (137 if result.timed_out else 1)
    assert result.timed_out or result.memory_exceeded


def test_a_program_that_sleeps_ends_with_its_time(attack: Attacker) -> None:
    result = attack("import time; print('before', flush=True); time.sleep(600)", timeout=0.5)
    assert result.timed_out
    assert result.stdout == "before\n"


OWNER = """
import sys
from forge_core.sandbox import SandboxedPythonCoder
coder = SandboxedPythonCoder(timeout=600)
coder.setup()
sandbox = coder.start("script", "import os, time; print(os.readlink('/proc/self/ns/pid'), flush=True); time.sleep(600)")
while b"\\n" not in sandbox.stdout:
    from forge_core.sandbox.process import look
    look([sandbox])
print(sandbox.stdout.decode(), flush=True)
sys.stdin.read()
"""


def test_a_sandbox_ends_with_its_owner_however_that_ends() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    namespace = owner.stdout.readline().strip()
    assert len(processes_of(namespace)) == 2
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + 5
    while processes_of(namespace):
        assert time.monotonic() < deadline
        time.sleep(0.02)

"""Further programs that mean harm, each with what comes of it."""

from __future__ import annotations

import re

import pytest

from tests.sandbox.conftest import Attacker

pytestmark = pytest.mark.server

ATTACKS = {  # name: (program, what it prints or what ends it)
    "stops itself": ("import signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timed_out"),
    "stops its group": ("import signal\nos.killpg(0, signal.SIGSTOP)", "timed_out"),
    "never stops in an exit handler": (
        "import atexit\natexit.register(lambda: open(os.mkfifo('/tmp/f') or '/tmp/f'))",
        "timed_out",
    ),
    "never stops in a finaliser": ("class A:\n    def __del__(self):\n        while True: pass\na = A()", "timed_out"),
    "hangs in a regular expression": ("import re\nre.match('(a+)+$', 'a' * 40 + 'b')", "timed_out"),
    "trickles output": ("import time\nwhile True: os.write(1, b'.'); time.sleep(0.01)", "timed_out"),
    "floods both streams": (
        "import threading\ndef flood(n):\n    while True: os.write(n, b'z' * 4096)\n"
        "threading.Thread(target=flood, args=(2,), daemon=True).start()\nflood(1)",
        "output_exceeded",
    ),
    "daemons flood what it leaves": (
        "for _ in range(5):\n    if not os.fork():\n        os.setsid()\n        while True: os.write(1, b'y' * 99)\n"
        "os._exit(0)",
        "y*",
    ),
    "makes folders in folders": ("while True: os.mkdir('d'); os.chdir('d')", "files_exceeded"),
    "makes a file with a hole": (
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "file = os.open('/tmp/s', os.O_RDWR | os.O_CREAT)\n"
        "for work in (lambda: os.ftruncate(file, 2**40), lambda: os.posix_fallocate(file, 0, 2**30)):\n"
        "    try: work(); print('made')\n    except OSError as error: print(error.errno)",
        "27\n27\n",
    ),
    "fills memory through files": (
        "import mmap\nfor n in range(12):\n    file = open(f'/tmp/{n}', 'wb+')\n    file.truncate(2**22)\n"
        "    m = mmap.mmap(file.fileno(), 0)\n    for at in range(0, 2**22, 4096): m[at] = 1\nprint('done')",
        "exit 135",
    ),
    "unpacks a bomb": (
        "import zlib\nz = zlib.compress(bytes(10**6))\nx = [zlib.decompress(z) for _ in range(500)]",
        "exit 1",
    ),
    "asks for a wide format": ("print('%1000000000d' % 1)", "memory_exceeded"),
    "writes a huge number": ("import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(7 ** 10**7)))", "timed_out"),
    "compiles a deep program": ("compile('(' * 10**5 + ')' * 10**5, 'x', 'eval')", "exit 1"),
    "reads address zero": ("import ctypes\nctypes.string_at(0)", "exit 139"),
    "calls the kernel the old way": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()",
        "exit (159|139)",
    ),
    "wants to go first": (
        "for work in (lambda: os.nice(-20), lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))):\n"
        "    try: work(); print('went')\n    except OSError as error: print(error.errno)",
        "1\n1\n",
    ),
    "types on a terminal": (
        "import fcntl, termios\nfor fd in (0, 1, 2):\n    try: fcntl.ioctl(fd, termios.TIOCSTI, b'x'); print('typed')\n"
        "    except OSError as error: print(error.errno)\nprint(os.path.exists('/dev/tty'))",
        "25\n25\n25\nFalse\n",
    ),
    "is saved from the kernel": (
        "try:\n    with open('/proc/self/oom_score_adj', 'w') as file: file.write('-1000')\n    print('saved')\n"
        "except OSError as error: print(error.errno)",
        "13\n",
    ),
    "sets the clock and the name": (
        "import socket, time\nfor work in (lambda: time.clock_settime(0, 0), lambda: socket.sethostname('x')):\n"
        "    try: work(); print('set')\n    except OSError as error: print(error.errno)",
        "1\n1\n",
    ),
    "starts a shell": (
        "import subprocess\ntry: subprocess.run(['/bin/sh'])\nexcept OSError as error: print(error.errno)",
        "2\n",
    ),
    "uses what was left open": (
        "wrote = 0\nfor fd in range(3, 200):\n    try: wrote += os.write(fd, b'x')\n    except OSError: pass\n"
        "print(wrote)",
        "0\n",
    ),
    "opens everything": (
        "files = []\ntry:\n    while True: files.append(open('/dev/zero'))\nexcept OSError: print('end')",
        "end\n",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_comes_of_an_attack(attack: Attacker, name: str) -> None:
    code, outcome = ATTACKS[name]
    result = attack(code, timeout=1.0 if outcome == "timed_out" else 10.0)
    if outcome in vars(result):
        assert getattr(result, outcome)
        assert outcome == "memory_exceeded" or result.exit_status == 137
    elif outcome.startswith("exit "):
        assert re.fullmatch(outcome.removeprefix("exit "), str(result.exit_status))
    else:
        assert re.fullmatch(outcome, result.stdout), result

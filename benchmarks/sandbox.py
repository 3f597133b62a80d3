"""Executions per second of the sandbox, what the sandbox costs, and what keeping one warm would gain.

    .venv/bin/python -m benchmarks.sandbox

Claims: a program in a sandbox of its own costs a few hundredths of a second more than one without, and a machine with
two cores runs tens of them a second. Measured for a program that prints one line: no sandbox (Python alone), a fresh
sandbox (what Forge does), sandboxes that were started ahead and wait for a program (each used once), and one sandbox
whose Python forks for every program. The last leaves files and processes of one program to the next, which is why
Forge does not do it; it is the bound of what any pool could reach. Then tests of code, as the reward runs them.
Rounds are interleaved; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from benchmarks.machine import provenance, write
from forge_core.sandbox import SandboxedPythonCoder
from forge_core.sandbox.asking import call, judge
from forge_core.sandbox.process import Process, watch

PROGRAM = "print(sum(map(int, input().split())))"
INPUT = "1 2"
WAITING = "import sys\nprint('ready', flush=True)\nexec(sys.stdin.readline(), {'input': lambda: '1 2'})"
FORKING = """
import io, os, sys
for line in sys.stdin:
    if not os.fork():
        sys.stdin = io.StringIO("1 2")
        exec("print(sum(map(int, input().split())))", {})
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def bare() -> None:
    argv = [sys.executable, "-I", "-S", "-c", PROGRAM]
    assert subprocess.run(argv, input=INPUT, capture_output=True, text=True, check=True).stdout == "3\n"


def per_second(work: Callable[[], object], count: int, threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(lambda _: work(), range(count)))
        return count / (time.perf_counter() - start)


def line_of(process: Process) -> bytes:
    watch([process], lambda: b"\n" in process.stdout or process.ended)
    line, _, rest = process.stdout.partition(b"\n")
    process.stdout[:] = rest
    return bytes(line)


def started_ahead(coder: SandboxedPythonCoder, count: int) -> tuple[float, float]:
    """Median seconds from program to result when a sandbox waits, and executions per second with the starts."""
    waits, start = [], time.perf_counter()
    for _ in range(count):
        process = coder.start("script", WAITING)
        line_of(process)
        asked = time.perf_counter()
        process.send(PROGRAM.encode() + b"\n")
        assert line_of(process) == b"3"
        waits.append(time.perf_counter() - asked)
        process.close()
    return median(waits), count / (time.perf_counter() - start)


def forked(coder: SandboxedPythonCoder, count: int) -> float:
    process = coder.start("script", FORKING, 60.0)
    start = time.perf_counter()
    for _ in range(count):
        process.send(b"go\n")
        assert line_of(process) == b"3"
    elapsed = time.perf_counter() - start
    process.close()
    return count / elapsed


def measure(coder: SandboxedPythonCoder, count: int) -> dict[str, float]:
    def run() -> None:
        assert coder.execute(PROGRAM, INPUT).stdout == "3\n"

    code = "def add(a, b): return a + b"
    wait, ahead = started_ahead(coder, count // 2)
    return {
        "bare_python_per_s_1_thread": per_second(bare, count, 1),
        "sandbox_per_s_1_thread": per_second(run, count, 1),
        "sandbox_per_s_2_threads": per_second(run, count, 2),
        "sandbox_per_s_4_threads": per_second(run, count, 4),
        "started_ahead_wait_ms": 1000 * wait,
        "started_ahead_per_s_1_thread": ahead,
        "forked_in_one_sandbox_per_s": forked(coder, count),
        "function_tests_per_s_2_threads": per_second(lambda: call(coder, code, "add", [1, 2]), count, 2),
        "assert_tests_per_s_2_threads": per_second(lambda: judge(coder, code, "assert add(1, 2) == 3"), count, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=100, help="programs of each kind in a round")
    options = parser.parse_args()
    coder = SandboxedPythonCoder()
    coder.setup()
    machine = provenance()
    rounds = [measure(coder, options.count) for _ in range(options.rounds)]
    figures = {name: round(median(found[name] for found in rounds), 1) for name in rounds[0]}
    bwrap = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    write("sandbox", {"machine": machine, "bubblewrap": bwrap, "programs_per_round": options.count, **figures})


if __name__ == "__main__":
    main()

"""A run goes on when nobody reads any more what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRINTING = """
import logging, sys
from pathlib import Path
from rich.console import Console
from flows.output import outlive_readers
early = Console(file=sys.stderr)  # as Prefect has one for its log lines
logging.basicConfig(level=logging.INFO, format="%(message)s")
{hook}
print("begun", flush=True)
sys.stdin.read()  # until the readers are gone
for line in range(3):
    {line}
sys.stdout.flush()
Path(sys.argv[1]).write_text("done")
"""
LINES = {
    "print": 'print("a line", flush=True)',
    "print to standard error": 'print("a line", file=sys.stderr, flush=True)',
    "rich": 'Console().print("a line")',
    "a console of before": 'early.print("a line")',
    "logging": 'logging.info("a line")',
}


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"], autouse=True)
def buffering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", request.param)


def end_of(tmp_path: Path, hook: str, line: str) -> tuple[int, bool]:
    """Exit status of a process that prints ``line`` when both its readers are gone, and whether it came to its end."""
    code, done = PRINTING.format(hook=hook, line=line), tmp_path / "done"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code, str(done)], stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"begun\n"
    process.stdout.close()
    process.stderr.close()
    process.stdin.close()
    return process.wait(60), done.exists()


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_it_comes_to_its_end(tmp_path: Path, line: str) -> None:
    assert end_of(tmp_path, "outlive_readers(); outlive_readers()", line) == (0, True)


@pytest.mark.parametrize("kind", ["print", "rich", "a console of before"])
def test_without_it_a_line_ends_the_process(tmp_path: Path, kind: str) -> None:
    status, done = end_of(tmp_path, "", LINES[kind])
    assert status != 0
    assert not done


def test_what_is_printed_is_read_in_order_while_somebody_reads() -> None:
    code = """
import sys
from flows.output import outlive_readers
print("one", end=" ")
outlive_readers()
print("two")
print("é", file=sys.stderr)
sys.stdout.buffer.write(b"three\\n")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "one two\nthree\n"
    assert ran.stderr == "é\n"

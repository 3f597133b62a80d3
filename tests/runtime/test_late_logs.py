"""What Prefect's threads log after the last test is no error of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT

LATE = """
import atexit
import logging

def test_something():
    from prefect.logging import get_logger
    from prefect.logging.configuration import setup_logging

    setup_logging()
    log = get_logger("prefect.server")
    assert any("prefect" in type(h).__module__ for one in (log, *_parents(log)) for h in one.handlers)
    atexit.register(log.warning, "the server has gone")

def _parents(log):
    while log := log.parent:
        yield log
"""


@pytest.mark.engine  # imports for seconds
def test_what_is_logged_after_the_tests_prints_no_traceback(tmp_path: Path):
    (tmp_path / "test_late.py").write_text(LATE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    end = subprocess.run([*command, "--rootdir", tmp_path, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert end.returncode == 0, end.stdout
    assert "Logging error" not in end.stderr

"""A resumed run loads its engines in several threads at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.processes import ROOT
from tests.runs.harness import advance, new_run

pytestmark = pytest.mark.engine

RESUMED = """
import sys, threading
from forge_core.runs.context import RunContext
from forge_core.runs.initialise import initialise
from forge_core.runs.record import load_run
from forge_core.store import open_store
from tests.runs.harness import reopened

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            print(name)

store = open_store(sys.argv[1])
ctx = reopened(RunContext(store, load_run(store, "tiny")))
initialise(ctx)
sys.meta_path.insert(0, Finder())

from tests.runs.harness import make_batch
from forge_core.runs.training import train_batch

def work():
    make_batch(ctx, 1)
    train_batch(ctx, 1)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_a_resumed_run_imports_nothing_of_transformers_in_the_threads_of_its_tasks(tmp_path: Path) -> None:
    advance(new_run(str(tmp_path)), 1)
    command = [sys.executable, "-c", RESUMED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    imported = done.stdout.split()
    assert "torchtitan" in imported, "the engines were loaded in the thread"
    assert [name for name in imported if name.startswith("transformers")] == []

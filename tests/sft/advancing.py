"""Go on with the run tiny-sft of a store until it is finished, each time in a new process, as often as asked.

    python -m tests.sft.advancing STORE DATA

For every line on standard input a process is forked and its id printed; when it has ended, its status. What a run
imports is imported once, before: so it is many killed processes for the price of one.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import forge_core.training.trainer  # noqa: F401 - what takes long
from forge_core.runs.record import load_run
from forge_core.runs.sft_context import SftContext
from forge_core.store import layout, open_store
from tests.sft.harness import advance, new_run


def go_on(root: str, data: Path) -> None:
    store = open_store(root)
    begun = store.exists(layout.run_json("tiny-sft"))
    ctx = SftContext(store, load_run(store, "tiny-sft")) if begun else new_run(store, data)
    advance(ctx, ctx.sft.steps)
    ctx.close()


def forked() -> int:
    """The id of a new process that goes on with the run."""
    if pid := os.fork():
        return pid
    try:
        go_on(sys.argv[1], Path(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    for _ in sys.stdin:
        pid = forked()
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

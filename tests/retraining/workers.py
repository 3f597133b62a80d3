"""Workers of work pools, for as long as a block lasts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.deploying.conftest import kill_all

PREFECT = str(Path(sys.executable).with_name("prefect"))


@contextmanager
def workers_of(pools: Sequence[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """One worker a pool, started outside of any project; their logs are ``worker-<pool>.log`` in ``folder``."""
    elsewhere, started = folder.parent, []
    for pool in pools:
        with (folder / f"worker-{pool}.log").open("wb") as log:
            command = [PREFECT, "worker", "start", "--pool", pool]
            often = {**environment, "PREFECT_WORKER_QUERY_SECONDS": "2"}
            started.append(subprocess.Popen(command, cwd=elsewhere, env=often, stdout=log, stderr=log))
    try:
        yield
    finally:
        kill_all([psutil.Process(worker.pid) for worker in started if worker.poll() is None])
        for worker in started:
            worker.wait(30)

"""An operator at work: types commands, starts and kills workers, looks at what the server, on PostgreSQL, says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge_core.store import Ledger, Store, open_store
from tests.docs.documents import ROOT
from tests.fixtures_postgres import create_database
from tests.fixtures_prefect import OperatedServer, forge_server

BIN = Path(sys.executable).parent
KILLED_STEPS = 30
RESTARTED = ["Scheduled", "Running", "Crashed", "Scheduled", "Running", "Completed"]  # a history with one crash
SMALL = {"warm_start.steps": 20, "eval.prompts": 16, "training.batch_size": 64, "training.warmup_steps": 0}


@dataclass
class Operator:
    server: OperatedServer
    store: Store
    folder: Path
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def type(self, command: str, status: int = 0) -> str:
        """Run a command in the checkout; its output. Fails the test when it does not end with ``status``."""
        environment = {**self.server.environment, "PATH": f"{BIN}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def deploy(self, *flags: str) -> dict[str, str]:
        """``forge deploy``: what it says of each thing, by name."""
        lines = [line.split(maxsplit=1) for line in self.type(" ".join(["forge deploy", *flags])).splitlines()]
        return {name: what for what, name in lines if what in ("created", "changed", "left")}

    def start_worker(self, pool: str) -> psutil.Process:
        log = (self.folder / f"worker-{len(list(self.folder.glob('worker-*.log')))}.log").open("wb")
        environment = {**self.server.environment, "PREFECT_WORKER_QUERY_SECONDS": "4"}
        command = [str(BIN / "prefect"), "worker", "start", "--pool", pool]
        self.workers.append(subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log))
        return psutil.Process(self.workers[-1].pid)

    def end_workers(self) -> None:
        """End every worker and what it runs."""
        kill_all([psutil.Process(worker.pid) for worker in self.workers if worker.poll() is None])
        for worker in self.workers:
            worker.wait(30)
        self.workers.clear()

    def run(self, deployment: str, **overrides: Any) -> str:
        """``prefect deployment run`` with overrides of the configuration; id of the flow run."""
        parameter = json.dumps({**SMALL, **overrides})
        said = self.type(f"prefect deployment run {deployment} --param 'overrides={parameter}'")
        return next(line.split()[-1] for line in said.splitlines() if "UUID" in line)

    def api(self, path: str, body: Any = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server.url + path, data=data, method=method)
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read() or b"null")

    def flow_run(self, flow_run: str) -> Any:
        return self.api(f"/flow_runs/{flow_run}")

    def states(self, flow_run: str) -> list[tuple[str, str | None]]:
        states = self.api(f"/flow_run_states/?flow_run_id={flow_run}")
        return [(state["name"], state["message"]) for state in sorted(states, key=lambda s: s["timestamp"])]

    def history(self, flow_run: str) -> list[str]:
        """Names of the states, without repetitions and without those of being handed to a worker."""
        names = [name for name, _ in self.states(flow_run) if name not in ("Pending", "Submitting")]
        return [name for name, _ in groupby(names)]

    def committed(self, run_id: str) -> int:
        return max(0, Ledger(self.store, run_id).head())

    def wait(self, what: str, done: Callable[[], Any], limit_s: float = 120.0) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            logs = "\n".join(f.read_text(errors="replace")[-3000:] for f in self.folder.glob("worker-*.log"))
            assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}\n{logs}"
            time.sleep(0.3)

    def ended(self, flow_run: str) -> bool:
        return self.flow_run(flow_run)["state_type"] in ("COMPLETED", "FAILED", "CANCELLED")


@pytest.fixture(scope="package")
def database(postgres: str) -> str:
    return create_database(postgres, "operated")


@pytest.fixture(scope="package")
def operator(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """An operator whose server and workers, and what they run, end with this folder's tests."""
    folder = tmp_path_factory.mktemp("operator")
    with forge_server(folder, PREFECT_SERVER_DATABASE_CONNECTION_URL=database) as server:
        operator = Operator(server, open_store(str(folder / "store")), folder)
        yield operator
        operator.end_workers()


@pytest.fixture(scope="package")
def deployed(operator: Operator) -> dict[str, str]:
    """What the first ``forge deploy`` said."""
    return operator.deploy("--store", operator.store.uri)


@pytest.fixture(scope="package")
def quickstart(operator: Operator, deployed: dict[str, str]) -> str:
    """Id of a finished flow run."""
    operator.start_worker("trainer")
    flow_run = operator.run("grpo/quickstart", steps=3)
    operator.wait("a run of three steps", lambda: operator.ended(flow_run))
    return flow_run


@pytest.fixture(scope="package")
def killed(operator: Operator, quickstart: str) -> str:
    """Id of a flow run that was killed in the middle, together with its worker; another worker waits for work."""
    flow_run = operator.run("grpo/quickstart", steps=KILLED_STEPS, **{"checkpoint.interval": 2})
    operator.wait("a run to kill", lambda: operator.committed(operator.flow_run(flow_run)["name"]) >= 3)
    operator.end_workers()
    assert operator.committed(operator.flow_run(flow_run)["name"]) < KILLED_STEPS
    operator.start_worker("trainer")
    return flow_run


def kill_all(processes: list[psutil.Process]) -> None:
    """``kill -9`` of each, workers before the flows that they run."""
    below = [child for process in processes for child in process.children(recursive=True)]
    for process in [*processes, *below]:
        if process.is_running():
            os.kill(process.pid, signal.SIGKILL)

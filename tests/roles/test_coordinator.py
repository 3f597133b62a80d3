"""A coordinator, its role deployments and their workers, on a real server with PostgreSQL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from forge_core.runs.heartbeat import read_heartbeat
from forge_core.store import Store, layout, open_store
from tests.faults.processes import ROOT
from tests.faults.stored import Stored, check_complete
from tests.fixtures_postgres import create_database
from tests.fixtures_prefect import OperatedServer, forge_server
from tests.roles.rewards import MARKER
from tests.runs.harness import TINY

pytestmark = [pytest.mark.server, pytest.mark.engine]

POOLS = ("coordinator", "trainer", "generator", "scorer", "reference")
STEPS = 8
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
BIN = Path(sys.executable).parent


def config(run_id: str) -> dict[str, Any]:
    return TINY | {
        "run": {"id": run_id, "seed": 3},
        "steps": STEPS,
        "max_staleness": 1,
        "grpo": {"n_samples": 4, "beta": 0.1},
        "roles": {"claim_timeout_s": 5, "wait_s": 200},
    }


@pytest.fixture(scope="module")
def server(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    """A server on PostgreSQL: with five workers SQLite is locked most of the time."""
    database = create_database(postgres, "roles")
    home = tmp_path_factory.mktemp("roles-home")
    with forge_server(home, PREFECT_SERVER_DATABASE_CONNECTION_URL=database) as started:
        yield started


@pytest.fixture(scope="module")
def workers(server: OperatedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All deployments on the server, and a worker for each pool; the folder has the workers' logs and the store."""
    folder = tmp_path_factory.mktemp("workers")
    code = {"PYTHONPATH": str(ROOT), "FORGE_CODE_PATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = server.environment | code | {MARKER: str(folder / "stuck")}
    deploy = [BIN / "forge", "deploy", "--store", folder / "store"]
    subprocess.run(deploy, cwd=ROOT, env=environment, check=True, timeout=180, capture_output=True)
    running = []
    for pool in POOLS:
        log = (folder / f"{pool}.log").open("wb")
        command = [BIN / "prefect", "worker", "start", "--pool", pool]
        running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
    yield folder
    for worker in running:
        worker.terminate()
    for worker in running:
        worker.wait(60)


@pytest.fixture
def launch(workers: Path, server: OperatedServer, tmp_path: Path) -> Callable[[dict[str, Any]], Any]:
    """``launch(config)`` starts the coordinator of a run; the function that it returns waits for its final state."""

    def start(values: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        path = tmp_path / f"{values['run']['id']}.yaml"
        path.write_text(yaml.safe_dump(values))
        deployment = api(server, "/deployments/name/grpo-distributed/train")
        body = {"parameters": {"config": str(path)}}
        run = api(server, f"/deployments/{deployment['id']}/create_flow_run", body)
        return lambda: final_state(server, run["id"], workers)

    return start


def api(server: OperatedServer, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def final_state(server: OperatedServer, flow_run: str, logs: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 280
    while True:
        state: dict[str, Any] = api(server, f"/flow_runs/{flow_run}")["state"]
        if state["type"] in ENDED:
            return state
        text = "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in logs.glob("*.log"))
        assert time.monotonic() < deadline, f"{state}\n{text}"
        time.sleep(0.5)


def roles_of(server: OperatedServer, run_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api(
        server, "/flow_runs/filter", {"flow_runs": {"tags": {"all_": [f"run:{run_id}"]}}, "limit": 200}
    )
    return found


def all_ended(server: OperatedServer, run_id: str) -> bool:
    """Whether the flow runs of all roles have ended, and with them their processes."""
    return all(r["state"]["type"] in ENDED for r in roles_of(server, run_id))


def heartbeats(store: Store, run_id: str, role: str) -> list[dict[str, Any]]:
    names = [key.rpartition("/")[2].removesuffix(".json") for key in store.list(f"{layout.run(run_id)}workers")]
    beats = [read_heartbeat(store, run_id, name) for name in names if name.startswith(role)]
    return [beat for beat in beats if beat is not None and not beat["ended"]]


def wait_for(condition: Callable[[], Any], timeout_s: float = 180.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def test_killed_roles_are_started_again_and_all_end_with_the_run(
    launch: Callable[..., Any], workers: Path, server: OperatedServer
) -> None:
    finished = launch(config("killed"))
    store = open_store(str(workers / "store"))
    run = Stored(str(workers / "store"), "killed")
    wait_for(lambda: run.ledger.head() >= 2)
    (trainer,) = heartbeats(store, "killed", "trainer")
    os.kill(trainer["pid"], signal.SIGKILL)
    (generator,) = heartbeats(store, "killed", "generator")
    os.kill(generator["pid"], signal.SIGSTOP)  # alive, as far as the server knows
    state = finished()
    if psutil.pid_exists(generator["pid"]):  # its worker may have ended it by now
        os.kill(generator["pid"], signal.SIGKILL)
    assert state["type"] == "COMPLETED", state
    check_complete(run, STEPS, 1)
    started = [r["parameters"]["name"].rpartition("-")[0] for r in roles_of(server, "killed")]
    assert sorted(set(started)) == ["generator-0", "reference-0", "scorer-0", "trainer-0"]
    assert started.count("trainer-0") == 2
    assert started.count("generator-0") == 2
    wait_for(lambda: all_ended(server, "killed"), 60)


def test_a_stuck_role_is_replaced_and_cancelling_the_coordinator_stops_all(
    launch: Callable[..., Any], workers: Path, server: OperatedServer
) -> None:
    stuck = {"functions": [{"path": "tests.roles.rewards:stuck_once"}], "timeout_s": 3600}
    values = config("cancelled") | {"steps": 1000, "rewards": stuck, "eval": {"prompts": 0}}
    finished = launch(values | {"roles": values["roles"] | {"stuck_s": 20}})
    run = Stored(str(workers / "store"), "cancelled")
    wait_for(lambda: run.ledger.head() >= 1)
    scorers = [r for r in roles_of(server, "cancelled") if r["parameters"]["name"].startswith("scorer")]
    assert len(scorers) == 2, scorers
    history = [s for r in scorers for s in api(server, f"/flow_run_states/?flow_run_id={r['id']}")]
    assert any("it has work and made nothing for 20 s" in (s["message"] or "") for s in history), history
    (coordinator,) = api(server, "/flow_runs/filter", {"flow_runs": {"name": {"any_": ["cancelled"]}}})
    state = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    api(server, f"/flow_runs/{coordinator['id']}/set_state", state)
    assert finished()["type"] == "CANCELLED"
    wait_for(lambda: all_ended(server, "cancelled"), 120)
    assert {r["state"]["type"] for r in roles_of(server, "cancelled")} == {"CANCELLED"}
    assert 1 <= run.ledger.verify() < 1000


def test_a_role_that_cannot_work_ends_the_run_with_its_reason(
    launch: Callable[..., Any], workers: Path, server: OperatedServer
) -> None:
    values = config("refused") | {"dataset": {"path": str(workers / "no-such-file.jsonl")}}
    state = launch(values)()
    assert state["type"] == "FAILED"
    assert "cannot work on this run" in state["message"]
    assert "no-such-file.jsonl" in state["message"]
    wait_for(lambda: all_ended(server, "refused"), 120)

"""A retraining in roles: its flow only coordinates; workers of every pool train, grade and evaluate."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from forge_core.store import Ledger, open_store
from forge_core.weights.registry import Registry
from tests.docs.documents import ROOT
from tests.fixtures_postgres import create_database
from tests.fixtures_prefect import OperatedServer, forge_server
from tests.retraining.tiny import NAME, new_data, write_project
from tests.retraining.workers import workers_of

POOLS = ("coordinator", "trainer", "generator", "scorer")


def api(server: OperatedServer, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/{path}", data, {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=30).read())


@pytest.mark.soak
def test_roles_train_the_candidate_and_a_generators_worker_evaluates_it(
    postgres: str, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("distributed")
    write_project(folder, distributed=True)
    new_data(folder, "monday")
    store = open_store(str(folder / "store"))
    database = create_database(postgres, "retraining")
    with forge_server(tmp_path_factory.mktemp("home"), PREFECT_SERVER_DATABASE_CONNECTION_URL=database) as server:
        environment = server.environment | {"PYTHONPATH": str(ROOT), "FORGE_CODE_PATH": str(folder)}
        deploy = [str(Path(sys.executable).with_name("forge")), "deploy", "--store", store.uri]
        subprocess.run(deploy, cwd=ROOT, env=environment, check=True, capture_output=True)
        with workers_of(POOLS, folder, environment):
            run = start(server, folder)
            state = ended(server, run)
            tags = {tag for flow_run in api(server, "flow_runs/filter", {}) for tag in flow_run["tags"]}
    assert state["type"] == "COMPLETED", state
    entry = Registry(store, NAME).head()
    assert entry is not None
    assert entry["action"] == "promote"
    run_id = entry["subject"]["run_id"]
    assert Ledger(store, run_id).verify() == 6
    assert {"role:trainer", "role:generator", "role:scorer"} <= tags
    assert sum(tag.startswith("evaluation:") for tag in tags) == 2  # of the candidate and of the model it started from


def start(server: OperatedServer, folder: Path) -> str:
    deployment = api(server, "deployments/name/retrain/nightly")
    body = {"parameters": {"config": str(folder / "retrain.yaml"), "overrides": {}}}
    return str(api(server, f"deployments/{deployment['id']}/create_flow_run", body)["id"])


def ended(server: OperatedServer, run: str, limit_s: float = 500.0) -> dict[str, Any]:
    deadline = time.monotonic() + limit_s
    while True:
        state: dict[str, Any] = api(server, f"flow_runs/{run}")["state"]
        if state["type"] in ("COMPLETED", "FAILED", "CANCELLED", "CRASHED"):
            return state
        assert time.monotonic() < deadline, state
        time.sleep(1.0)

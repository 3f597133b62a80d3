"""A user's own flow, deployed on a server of Prefect's own that wants a password, and run by a worker that has it
(docs/own-flow.md)."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_core.store import Store, layout, open_store
from tests.deploying.conftest import BIN
from tests.docs.documents import ROOT, blocks
from tests.fixtures_prefect import OperatedServer, prefects_own_server
from tests.runs.harness import advance, new_run

pytestmark = [pytest.mark.server, pytest.mark.engine]

HERE = ROOT / "tests" / "platform"
AUTH = "forge:open-sesame"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    """``prefect server start``, which refuses whoever does not have the authentication string."""
    with prefects_own_server(tmp_path_factory.mktemp("home"), PREFECT_SERVER_API_AUTH_STRING=AUTH) as server:
        yield server


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run of which one training step is committed."""
    store = open_store(str(tmp_path_factory.mktemp("run") / "store"))
    advance(new_run(store), 1)
    return store


def api(server: OperatedServer, path: str, body: Any = None, auth: str | None = AUTH) -> Any:
    request = urllib.request.Request(server.url + path, data=None if body is None else json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    if auth is not None:
        request.add_header("authorization", f"Basic {base64.b64encode(auth.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read() or b"null")


def environment(server: OperatedServer, auth: str | None = AUTH) -> dict[str, str]:
    known = {} if auth is None else {"PREFECT_API_AUTH_STRING": auth}
    paths = {"PYTHONPATH": str(ROOT), "FORGE_CODE_PATH": str(ROOT)}  # of the run's reward
    paths |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PREFECT_WORKER_QUERY_SECONDS": "3"}
    return {**server.environment, **known, **paths}


def typed(server: OperatedServer, *command: str, auth: str | None = AUTH) -> subprocess.CompletedProcess[str]:
    program = [str(BIN / command[0]), *command[1:]]
    known = environment(server, auth)
    return subprocess.run(program, cwd=ROOT, env=known, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("auth", [None, "forge:wrong"])
def test_a_client_without_the_authentication_string_is_refused(server: OperatedServer, auth: str | None):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        api(server, "/flows/filter", {}, auth)
    assert api(server, "/flows/filter", {}) == []
    refused = typed(server, "forge", "deploy", "--file", str(HERE / "prefect.yaml"), auth=auth)
    assert refused.returncode != 0
    assert "401" in refused.stdout + refused.stderr
    assert api(server, "/deployments/filter", {}) == []


def test_the_flow_is_deployed_and_run_by_a_worker(server: OperatedServer, stored: Store, tmp_path: Path):
    deployed = typed(server, "forge", "deploy", "--file", str(HERE / "prefect.yaml"), "--store", stored.uri)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    assert "deployment preview/own" in deployed.stdout
    parameters = ["--param=run_id=tiny", f"--param=store={stored.uri}"]
    asked = typed(server, "prefect", "deployment", "run", "preview/own", *parameters)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    log = (tmp_path / "worker.log").open("wb")
    command = [str(BIN / "prefect"), "worker", "start", "--pool", "generator", "--run-once"]
    worker = subprocess.Popen(command, cwd=tmp_path, env=environment(server), stdout=log, stderr=log)
    try:
        run = _finished(server, worker)
    finally:
        worker.terminate()
        worker.wait(60)
    assert run["state_type"] == "COMPLETED", run["state"]["message"] + (tmp_path / "worker.log").read_text()[-3000:]
    (table,) = api(server, "/artifacts/filter", {})
    rows = json.loads(table["data"])
    assert table["description"] == "Batch 1 of tiny"
    assert len(rows) == 32
    assert rows[0].keys() == {"prompt", "answer", "reward"}
    assert all(stored.published(layout.rewards("tiny", 1, 0, shard)) for shard in range(2)), "the run may use them"
    assert not stored.exists(layout.ledger("tiny", 1)), "nothing was trained"


def _finished(server: OperatedServer, worker: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        (run,) = api(server, "/flow_runs/filter", {})
        if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return run
        time.sleep(0.5)
    return run


def test_the_document_shows_the_flow_and_the_deployment_that_are_tested():
    shown = [block.text for block in blocks(ROOT / "docs" / "own-flow.md")]
    assert (HERE / "own_flow.py").read_text() in shown
    assert (HERE / "prefect.yaml").read_text().split("\n", 1)[1] in shown

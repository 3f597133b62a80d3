"""The server on PostgreSQL, with a password, as docs/operating.md sets it up for real use."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forge_core.store import Ledger, open_store
from tests.deploying.conftest import Operator, kill_all
from tests.fixtures_postgres import create_database
from tests.fixtures_prefect import OperatedServer, forge_server

pytestmark = [pytest.mark.server, pytest.mark.engine]
AUTHENTICATION = "forge:open-sesame"


@pytest.fixture(scope="module")
def database(postgres: str) -> str:
    return create_database(postgres, "operated")


@pytest.fixture(scope="module")
def server(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    settings = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
        "PREFECT_SERVER_API_AUTH_STRING": AUTHENTICATION,
    }
    with forge_server(tmp_path_factory.mktemp("postgres-home"), **settings) as server:
        server.environment["PREFECT_API_AUTH_STRING"] = AUTHENTICATION
        yield server


def query(database: str, statement: str) -> str:
    command = ["psql", database.replace("+asyncpg", ""), "-tAc", statement]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def test_who_does_not_know_the_password_is_kept_out(server: OperatedServer):
    request = urllib.request.Request(f"{server.url}/flow_runs/filter", b"{}", {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=30)


def test_a_deployed_run_is_recorded_in_postgresql_and_nothing_in_sqlite(
    server: OperatedServer, database: str, tmp_path: Path
):
    operator = Operator(server, open_store(str(tmp_path / "store")), tmp_path)
    assert set(operator.deploy("--store", operator.store.uri).values()) == {"created"}
    worker = operator.start_worker("trainer")
    try:
        operator.run("grpo/quickstart", steps=2, **{"run.id": "recorded"})
        state = "select state_name from flow_run where name = 'recorded'"
        operator.wait("the run", lambda: query(database, state) in ("Completed", "Failed", "Crashed"))
    finally:
        kill_all([psutil.Process(worker.pid)])
    assert query(database, state) == "Completed"
    assert Ledger(operator.store, "recorded").head() == 2
    assert query(database, "select count(*) from deployment") == "9"
    assert set(operator.deploy().values()) == {"left"}
    assert not list(server.home.glob("*.db"))

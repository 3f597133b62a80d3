"""The server on its default database, with a password. (The other tests of this folder use PostgreSQL.)"""

from __future__ import annotations

import socket
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from forge_core.store import Ledger, open_store
from tests.deploying.conftest import Operator
from tests.fixtures_prefect import OperatedServer, forge_server

pytestmark = [pytest.mark.server, pytest.mark.engine]
AUTHENTICATION = "forge:open-sesame"
ENDED = ("Completed", "Failed", "Crashed", "Cancelled")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    home = tmp_path_factory.mktemp("sqlite-home")
    with forge_server(home, PREFECT_SERVER_API_AUTH_STRING=AUTHENTICATION) as server:
        server.environment["PREFECT_API_AUTH_STRING"] = AUTHENTICATION
        yield server


def test_by_itself_the_server_listens_on_one_loopback_address(server: OperatedServer):
    port = int(server.url.split(":")[2].split("/")[0])
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_who_does_not_know_the_password_is_kept_out(server: OperatedServer):
    request = urllib.request.Request(f"{server.url}/flow_runs/filter", b"{}", {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=30)


@pytest.fixture(scope="module")
def operator(server: OperatedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """With everything deployed, and a worker for runs that train."""
    folder = tmp_path_factory.mktemp("sqlite-operator")
    operator = Operator(server, open_store(str(folder / "store")), folder)
    assert set(operator.deploy("--store", operator.store.uri).values()) == {"created"}
    operator.start_worker("trainer")
    yield operator
    operator.end_workers()


def test_a_deployed_run_is_recorded_in_the_forge_home(server: OperatedServer, operator: Operator):
    operator.run("grpo/quickstart", steps=2, **{"run.id": "recorded"})
    operator.wait("the run", lambda: state(server, "recorded") in ENDED)
    assert state(server, "recorded") == "Completed"
    assert Ledger(operator.store, "recorded").head() == 2
    assert set(operator.deploy().values()) == {"left"}


def test_a_run_goes_on_when_its_machine_is_taken_and_ends_when_somebody_stops_it(
    server: OperatedServer, operator: Operator
):
    """Neither is a failure: the log of the worker has no traceback."""
    flow_run = operator.run("grpo/quickstart", steps=4000, **{"run.id": "stopped"})
    operator.wait("a training step", lambda: operator.committed("stopped") >= 1)
    family = psutil.Process(operator.workers[0].pid).children(recursive=True)
    (flow,) = [process for process in family if "prefect.engine" in process.cmdline()]
    flow.terminate()
    flow.wait(60)
    taken = operator.committed("stopped")
    operator.wait("a training step after that", lambda: operator.committed("stopped") > taken)
    seen = states(server, flow_run)
    print(seen)
    assert seen.count("Preempted") == 1
    assert seen.count("Running") == 2
    operator.type(f"forge stop stopped --store {operator.store.uri}")
    operator.wait("the end", lambda: state(server, "stopped") in ENDED)
    assert state(server, "stopped") == "Cancelled"
    log = operator.folder / "worker-0.log"
    operator.wait("the ends of both processes", lambda: log.read_text().count("exited with status code") == 2)
    for how in ("SIGTERM", "forge stop"):
        assert f"The flow run was stopped: {how}; go on with: forge resume stopped" in log.read_text()
    assert "Traceback" not in log.read_text()


def state(server: OperatedServer, name: str) -> str | None:
    (found,) = asked(server, "select state_name from flow_run where name = ?", name) or [None]
    return found


def states(server: OperatedServer, flow_run: str) -> list[str]:
    return asked(server, "select name from flow_run_state where flow_run_id = ? order by timestamp", flow_run)


def asked(server: OperatedServer, question: str, about: str) -> list[str]:
    with closing(sqlite3.connect(server.home / "prefect.db", timeout=60)) as database:
        return [row[0] for row in database.execute(question, (about,))]

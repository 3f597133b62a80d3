"""The server of a run. Each start costs seconds, so one home is used for several tests, in order of appearance."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from docket.dependencies import current_execution
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.events.models import automations
from prefect.utilities.asyncutils import run_coro_as_sync
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from flows.home import ServerError, forge_home
from flows.server import RECORD, ServerHandle, ensure_server, running_server
from flows.server_process import END_S, begin, later
from forge_core.files import write_whole
from tests.fixtures_prefect import forge_server

pytestmark = pytest.mark.server

START = """
import sys
from pathlib import Path
from flows.server import ensure_server
handle = ensure_server(Path(sys.argv[1]))
print(handle.url, handle.process.pid if handle.started else 0, flush=True)
"""
FLOW = """
from prefect import flow, task
@task
def double(n): return 2 * n
@flow
def doubled(): return sum(f.result() for f in [double.submit(n) for n in range(10)])
assert doubled() == 90
handle.stop()
print("stopped", flush=True)
"""
WAIT = "sys.stdin.read()"
SERVE = """
import sys
from pathlib import Path
from flows.server import serve
serve(Path(sys.argv[1]), 0)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def run_script(code: str, home: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "FORGE_HOME"))}
    command = [sys.executable, "-c", code, str(home)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def started(script: subprocess.Popen[str]) -> tuple[str, int]:
    assert script.stdout is not None
    url, pid = script.stdout.readline().split()
    return url, int(pid)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).read() == b"true"
    except OSError:
        return False


def running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def remote_addresses(pid: int) -> set[str]:
    """Remote ends of the open connections of a process, as /proc writes them."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    rows = [row.split() for table in ("tcp", "tcp6", "udp", "udp6") for row in net_rows(table)]
    return {row[2].split(":")[0] for row in rows if row[9] in inodes}


def net_rows(table: str) -> list[str]:
    path = Path(f"/proc/net/{table}")
    return path.read_text().splitlines()[1:] if path.exists() else []


LOOPBACK_OR_LISTENING = {"0100007F", "00000000", "0" * 32, "0000000000000000FFFF00000100007F"}


def test_a_run_leaves_its_whole_history_in_the_home(home: Path) -> None:
    with run_script(START + FLOW, home) as script:
        url, pid = started(script)
        assert os.getsid(pid) == pid, "Ctrl-C in the terminal must not reach the server"
        assert script.stdout is not None
        assert script.stdout.readline() == "stopped\n"
    assert script.returncode == 0
    assert not answers(url)
    assert not running(pid)
    with sqlite3.connect(home / "prefect.db") as database:
        assert database.execute("select state_name from flow_run").fetchall() == [("Completed",)]
        assert database.execute("select distinct state_name, count(*) from task_run").fetchall() == [("Completed", 10)]


def test_two_runs_of_one_home_at_once_have_databases_of_their_own_and_die_by_kill_9_with_their_servers(
    home: Path,
) -> None:
    scripts = [run_script(START + WAIT, home) for _ in range(2)]
    servers = [started(script) for script in scripts]
    assert all(answers(url) for url, _ in servers)
    assert len({url for url, _ in servers}) == 2
    assert (home / "prefect-1.db").exists()
    for script in scripts:
        script.kill()
    deadline = time.monotonic() + 2
    while any(running(pid) for _, pid in servers):
        assert time.monotonic() < deadline, "a server outlived its run"
        time.sleep(0.02)
    for script in scripts:
        script.wait()


def test_the_server_that_an_operator_started_is_shared_and_survives_the_runs(home: Path) -> None:
    operator = run_script(SERVE, home)
    try:
        wait_for_record(home, operator.pid)
        with run_script(START, home) as script:
            url, pid = started(script)
        assert pid == 0, "the run used the operator's server instead of starting one"
        assert url == json.loads((home / "server.json").read_text())["url"]
        assert answers(url)
    finally:
        operator.send_signal(signal.SIGINT)
        operator.wait(20)


def wait_for_record(home: Path, pid: int) -> None:
    record = home / "server.json"
    deadline = time.monotonic() + 120
    while not (record.exists() and (r := json.loads(record.read_text()))["pid"] == pid and answers(r["url"])):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    "text", ["", '{"url": "http://127.', "[]", "{}", '{"url": "http://127.0.0.1:9/api", "pid": null}']
)
def test_a_record_of_a_server_that_cannot_be_read_is_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (tmp_path / RECORD).write_text(text)
    assert running_server(tmp_path) is None


def test_a_record_is_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is killed in the middle leaves what was there."""
    file = tmp_path / RECORD
    write_whole(file, "before")

    def killed(self: Path, text: str) -> int:
        with self.open("w") as output:
            output.write(text[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "afterwards")
    monkeypatch.undo()
    assert file.read_text() == "before"
    write_whole(file, "afterwards")
    assert file.read_text() == "afterwards"


def test_a_flow_run_calls_nobody_outside(prefect_server: ServerHandle) -> None:
    from prefect import flow, task

    assert prefect_server.process is not None
    processes = (prefect_server.process.pid, os.getpid())
    seen: set[str] = set()

    @task
    def look() -> None:
        time.sleep(0.05)
        seen.update(*(remote_addresses(pid) for pid in processes))

    @flow
    def looking() -> None:
        for future in [look.submit() for _ in range(10)]:
            future.result()

    looking()
    assert "0100007F" in seen
    assert seen <= LOOPBACK_OR_LISTENING


def test_a_prefect_that_was_imported_before_uses_the_server_too(prefect_server: ServerHandle) -> None:
    code = f"""
import prefect, os
from prefect.settings import PREFECT_API_URL
assert PREFECT_API_URL.value() is None
os.environ["PREFECT_API_URL"] = "{prefect_server.url}"
from flows.server import ensure_server
assert not ensure_server().started
from threading import Thread
seen = []
thread = Thread(target=lambda: seen.append(PREFECT_API_URL.value()))
thread.start(); thread.join()
assert seen == [PREFECT_API_URL.value()] == ["{prefect_server.url}"], seen
"""
    environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def test_a_configured_server_is_used_and_never_stopped(prefect_server: ServerHandle) -> None:
    handle = ensure_server()
    assert (handle.url, handle.started) == (prefect_server.url, False)
    handle.stop()
    assert answers(prefect_server.url)
    assert handle.flow_run_url("1-2").endswith("/runs/flow-run/1-2")


def test_a_configured_server_that_does_not_answer_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9/api.*unset PREFECT_API_URL"):
        ensure_server()


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (tmp_path / "prefect.db").write_text("this is not a database")
    meanwhile: list[str] = []
    with pytest.raises(ServerError, match=r"(?s)while starting.*prefect\.log.*file is not a database.*PREFECT_API_URL"):
        ensure_server(tmp_path, meanwhile=lambda: meanwhile.append(os.environ["PREFECT_API_URL"]))
    assert not any(map(answers, meanwhile))
    assert len(meanwhile) == 1
    assert "PREFECT_API_URL" not in os.environ


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match=r"file/home.*FORGE_HOME"):
        ensure_server(tmp_path / "file" / "home")


def test_the_home_is_the_argument_then_the_environment_then_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_HOME", "/from/environment")
    assert forge_home(Path("/argument")) == Path("/argument")
    assert forge_home() == Path("/from/environment")
    monkeypatch.delenv("FORGE_HOME")
    assert forge_home() == Path.home() / ".forge"


def test_what_prefect_does_after_writing_an_automation_does_not_stop_the_servers_event_loop() -> None:
    async def server() -> list[str]:
        lock, done = asyncio.Lock(), list[str]()

        async def load() -> None:
            async with lock:
                done.append("loaded")

        async with lock:  # as Prefect's triggers do while they look for changes
            later(load())
            assert not done
        await asyncio.sleep(0.05)
        return done

    assert asyncio.run(server()) == ["loaded"]
    assert automations.run_coro_as_sync is run_coro_as_sync, "this Prefect waits in another way, if at all"


def test_a_server_whose_database_is_locked_ends_in_time(tmp_path: Path) -> None:
    """Prefect waits a minute for the lock. (20 s)"""
    with forge_server(tmp_path) as server, closing(sqlite3.connect(tmp_path / "prefect.db")) as database:
        database.isolation_level = None
        database.execute("BEGIN IMMEDIATE")
        body, content = json.dumps({"name": "waits"}).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(f"{server.url}/flows/", body, content)
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(request, timeout=2)
        process = psutil.Process(json.loads((tmp_path / "server.json").read_text())["pid"])
        process.terminate()
        assert process.wait(END_S + 5) is not None


@pytest.mark.parametrize(("name", "ended"), [("mark_deployments_ready", 0), ("another_task", 1)])
def test_tasks_that_mark_what_a_poll_has_seen_wait_for_each_other(tmp_path: Path, name: str, ended: int) -> None:
    class AsServed(AioSqliteConfiguration):
        begin_transaction = begin(AioSqliteConfiguration.begin_transaction)

    async def server() -> list[object]:
        database = AsServed(connection_url=f"sqlite+aiosqlite:///{tmp_path}/prefect.db", timeout=10.0)
        engine = await database.engine()
        async with await database.session(engine) as session, database.begin_transaction(session, True):
            await session.execute(text("CREATE TABLE seen (polls INTEGER)"))
            await session.execute(text("INSERT INTO seen VALUES (0)"))

        async def mark() -> None:
            current_execution.set(SimpleNamespace(function_name=name))
            async with await database.session(engine) as session, database.begin_transaction(session):
                await session.execute(text("SELECT polls FROM seen"))
                await asyncio.sleep(0.2)
                await session.execute(text("UPDATE seen SET polls = polls + 1"))

        try:
            return await asyncio.gather(mark(), mark(), return_exceptions=True)
        finally:
            await engine.dispose()

    failed = [result for result in asyncio.run(server()) if isinstance(result, OperationalError)]
    assert len(failed) == ended, "Prefect's own transactions fail where one has written after another has read"

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.cli import main
from flows.commands.running import run_flow
from flows.redo_session import RescoreSession
from flows.server import ServerHandle
from flows.session import GRPO, Session, session_of_stored
from flows.stopping import StopWatcher, next_request, request_stop, starting
from forge_core.runs.record import RunRecord, create_run, load_run
from forge_core.stop import Stopped, StopToken
from forge_core.store import Store, layout, open_store
from tests.runs.harness import tiny

FLOWS = """
import signal, sys
from prefect import flow, runtime, task
from prefect.states import Cancelled
from flows.stopping import StopWatcher
from forge_core.stop import Stopped, StopToken
from forge_core.store import open_store
store = open_store(sys.argv[1])
stop = StopToken()

@task
def generate():
    stop.wait(60)
    stop.check()

@flow
def trains():
    try:
        with StopWatcher(stop, store, "run-1", runtime.flow_run.id):
            print(runtime.flow_run.id, flush=True)
            generate.submit().result()
    except Stopped as stopped:
        return Cancelled(message=str(stopped))

for _ in sys.stdin:
    stop = StopToken()
    state = trains(return_state=True)
    own = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print(state.type.value, "|", state.message, "|", own, flush=True)
"""


class Flows:
    """A process that runs the flow above again each time :meth:`begin` is called."""

    def __init__(self, store: str) -> None:
        command = [sys.executable, "-c", FLOWS, store]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def flows(prefect_server: ServerHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Flows, Store]]:
    root = str(tmp_path_factory.mktemp("store"))
    running = Flows(root)
    yield running, open_store(root)
    running.process.kill()
    running.process.wait()


def set_state(server: ServerHandle, flow_run_id: str, state: str) -> None:
    body = json.dumps({"state": {"type": state}}).encode()
    url = f"{server.url}/flow_runs/{flow_run_id}/set_state"
    request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert json.load(reply)["status"] == "ACCEPT"


def state_in_prefect(server: ServerHandle, flow_run_id: str) -> str:
    with urllib.request.urlopen(f"{server.url}/flow_runs/{flow_run_id}", timeout=10) as reply:
        return str(json.load(reply)["state"]["type"])


@pytest.mark.server
@pytest.mark.parametrize("way", ["Ctrl-C", "SIGTERM", "forge stop", "cancelled in Prefect"])
def test_every_way_to_stop_ends_the_flow_cancelled_within_ten_seconds(
    way: str, flows: tuple[Flows, Store], prefect_server: ServerHandle
) -> None:
    running, store = flows
    flow_run_id = running.begin()
    act: dict[str, Callable[[], object]] = {
        "Ctrl-C": lambda: running.process.send_signal(signal.SIGINT),
        "SIGTERM": lambda: running.process.send_signal(signal.SIGTERM),
        "forge stop": lambda: request_stop(store, "run-1"),
        "cancelled in Prefect": lambda: set_state(prefect_server, flow_run_id, "CANCELLING"),
    }
    started = time.monotonic()
    act[way]()
    assert running.line() == f"CANCELLED | stopped: {way} | True"
    assert time.monotonic() - started < 10
    assert state_in_prefect(prefect_server, flow_run_id) == "CANCELLED"


def test_a_second_ctrl_c_ends_the_process_and_its_children_at_once() -> None:
    code = """
import subprocess, time
from flows.stopping import StopWatcher
from forge_core.stop import StopToken
from forge_core.store import open_store
stop = StopToken()
with StopWatcher(stop, open_store("memory://second-ctrl-c"), "run-1", None):
    engine = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True)
    worker = subprocess.Popen(["sleep", "60"])
    print(engine.pid, worker.pid, flush=True)
    stop.wait(30)
    print(stop.reason, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    engine, worker = (int(pid) for pid in process.stdout.readline().split())
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "Ctrl-C\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    deadline = time.monotonic() + 5
    while group_exists(engine) or Path(f"/proc/{worker}/cwd").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def group_exists(group: int) -> bool:
    """Whether a process of the group runs (a zombie that nobody has reaped yet does not)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state != "Z":
            return True
    return False


def test_requests_are_numbered_and_old_ones_do_not_stop_a_resumed_run() -> None:
    store = open_store("memory://stop-requests")
    assert [request_stop(store, "run-1"), request_stop(store, "run-1")] == [0, 1]
    assert next_request(store, "run-1") == 2
    assert "requested_at" in store.read_json(layout.stop("run-1", 1))
    stop = StopToken()
    with StopWatcher(stop, store, "run-1", None):
        assert not stop.wait(0.3)
        request_stop(store, "run-1")
        assert stop.wait(5)
    assert stop.reason == "forge stop"


def test_a_request_counts_from_the_start_of_the_command_on() -> None:
    store = open_store("memory://starting")
    request_stop(store, "run-1")
    with starting(store, "run-1"):
        request_stop(store, "run-2")
        request_stop(store, "run-1")
        with starting(store, "run-1"):  # as the flow does, once the command has begun
            stop, other = StopToken(), StopToken()
            watchers = StopWatcher(stop, store, "run-1", None), StopWatcher(other, store, "run-2", None)
    with watchers[0], watchers[1]:
        assert stop.wait(5)
        assert not other.wait(0.3)
    again = StopToken()
    with StopWatcher(again, store, "run-1", None):
        assert not again.wait(0.3), "a later resumption of this process begins anew"


def test_a_request_while_the_server_starts_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    store, reasons = open_store("memory://server-starts"), list[str | None]()

    def server(meanwhile: Callable[[], object]) -> ServerHandle:
        request_stop(store, "run-1")
        return ServerHandle("http://nowhere/api", "http://nowhere")

    def flow() -> object:
        stop = StopToken()
        with StopWatcher(stop, store, "run-1", None):
            stop.wait(5)
        reasons.append(stop.reason)
        return SimpleNamespace(is_completed=lambda: True)

    monkeypatch.setattr("flows.server.ensure_server", server)
    assert run_flow(flow, store, "run-1") == 0
    assert reasons == ["forge stop"]


def test_a_request_while_resume_checks_its_input_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    store, reasons = open_store("memory://resume-checks"), list[str | None]()
    create_run(store, tiny())

    def checks_and_runs(args: argparse.Namespace, store: Store) -> int:
        request_stop(store, "tiny")
        stop = StopToken()
        with StopWatcher(stop, store, "tiny", None):
            stop.wait(5)
        reasons.append(stop.reason)
        return 0

    monkeypatch.setattr("flows.commands.running._resume", checks_and_runs)
    assert main(["resume", "tiny", "--store", store.uri]) == 0
    assert reasons == ["forge stop"]


def test_a_request_while_a_run_is_sealed_ends_that_and_the_session_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store("memory://sealing")
    record = create_run(store, tiny())

    def replay(store: Store, record: RunRecord, stop: StopToken) -> None:
        request_stop(store, "tiny")
        assert stop.wait(5)
        stop.check()

    monkeypatch.setattr("flows.session.seal", replay)
    kind = replace(
        GRPO,
        check=lambda config: [],
        opened=lambda store, record: SimpleNamespace(record=record, stop=StopToken()),
    )
    session = session_of_stored(kind, "tiny", store.uri, ["steps=8"], ["steps"], False)
    assert session.stop.reason == "forge stop"
    assert (session.record.config.steps, load_run(store, "tiny").changes) == (record.config.steps, 0)
    monkeypatch.setattr("flows.session.seal", lambda store, record, stop: None)
    session = session_of_stored(kind, "tiny", store.uri, ["steps=8"], ["steps"], False)
    assert (session.stop.is_set(), session.record.config.steps) == (False, 8)


def test_a_session_that_is_stopped_before_it_begins_begins_nothing() -> None:
    for kind in (Session, RescoreSession):
        session = object.__new__(kind)
        session.stop = StopToken()
        session.stop.set("forge stop")
        with pytest.raises(Stopped):
            session.first_batch()


def test_a_store_that_fails_neither_stops_nor_fails_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Store):
        def exists(self, key: str) -> bool:
            if fail:
                raise OSError("bucket is gone")
            return super().exists(key)

    fail = False
    store = open_store("memory://failing")
    store.__class__ = Failing
    stop = StopToken()
    with StopWatcher(stop, store, "run-1", None) as watcher:
        fail = True
        watcher._watch_once("stop-requests", lambda: watcher._requested(0))
    assert watcher.errors >= 1
    assert not stop.is_set()
    assert "bucket is gone" in caplog.text


def test_handlers_are_put_back() -> None:
    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    stop = StopToken()
    with StopWatcher(stop, open_store("memory://handlers"), "run-1", None):
        assert signal.getsignal(signal.SIGTERM) != before[1]
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(2)
    assert stop.reason == "SIGTERM"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

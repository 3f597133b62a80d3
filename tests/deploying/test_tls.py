"""A Prefect server behind TLS and a password, with the proxy of docs/operating.md: a real nginx, and what a client that
cannot get in is told."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.home import ServerError
from flows.named_server import require_server
from tests.fixtures_prefect import OperatedServer, forge_server

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
PASSWORD = "ada:a-password"


@dataclass(frozen=True)
class Proxy:
    url: str
    certificate: Path
    server: OperatedServer


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = made_certificate(folder)
    with (
        forge_server(tmp_path_factory.mktemp("tls-home"), PREFECT_SERVER_API_AUTH_STRING=PASSWORD) as server,
        Nginx(folder, key, certificate, server.ui_url) as port,
    ):
        yield Proxy(f"https://localhost:{port}/api", certificate, server)


def made_certificate(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    out = ("-keyout", str(key), "-out", str(certificate), "-days", "2")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *out, *names]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return key, certificate


class Nginx:
    """The document's configuration, with this test's port, names and files."""

    def __init__(self, folder: Path, key: Path, certificate: Path, upstream: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        text = (ROOT / "docs" / "operating.md").read_text()
        site = text.split("```nginx\n", 1)[1].split("```", 1)[0]
        for old, new in {
            "listen 443 ssl": f"listen 127.0.0.1:{self._port} ssl",
            "forge.example": "localhost",
            "/etc/ssl/forge.pem": str(certificate),
            "/etc/ssl/private/forge.key": str(key),
            "http://127.0.0.1:4200": upstream,
        }.items():
            assert old in site, old
            site = site.replace(old, new)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        http = f"http {{ access_log off; {paths}\n{site}\n}}"
        self._configuration = folder / "nginx.conf"
        self._configuration.write_text(f"daemon off; pid {folder}/pid; error_log {folder}/log;\nevents {{}}\n{http}\n")

    def __enter__(self) -> int:
        program = shutil.which("nginx") or "/usr/sbin/nginx"
        self._process = subprocess.Popen([program, "-c", str(self._configuration)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self._process.poll() is None:
            with socket.socket() as there:
                if there.connect_ex(("127.0.0.1", self._port)) == 0:
                    return self._port
            time.sleep(0.1)
        raise AssertionError((self._configuration.parent / "log").read_text())

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def told(url: str, **environment: str) -> str:
    """What a client with this environment is told of the server at ``url``; empty: it may come in."""
    import prefect.settings as settings

    updates = {getattr(settings, name): value for name, value in {"PREFECT_API_URL": url, **environment}.items()}
    with settings.temporary_settings(updates):
        try:
            require_server(url)
        except ServerError as error:
            return str(error)
    return ""


def test_who_cannot_get_in_is_told_why(proxy: Proxy, tmp_path: Path) -> None:
    trust = {"PREFECT_API_SSL_CERT_FILE": str(proxy.certificate)}
    said = told(proxy.url)
    assert "not trusted" in said
    assert "PREFECT_API_SSL_CERT_FILE" in said
    assert "PREFECT_API_AUTH_STRING" in told(proxy.url, **trust)
    assert "PREFECT_API_AUTH_STRING" in told(proxy.url, **trust, PREFECT_API_AUTH_STRING="ada:another")
    assert "is not there" in told(proxy.url, PREFECT_API_SSL_CERT_FILE=str(tmp_path / "nothing.pem"))
    assert "no Prefect server answers" in told(proxy.url.removesuffix("/api") + "/elsewhere/api", **trust)
    assert told(proxy.url, **trust, PREFECT_API_AUTH_STRING=PASSWORD) == ""


def test_a_run_reports_through_the_proxy_with_its_events(proxy: Proxy, tmp_path: Path) -> None:
    environment = {**proxy.server.environment, "PREFECT_API_URL": proxy.url, "PREFECT_API_AUTH_STRING": PASSWORD}
    environment |= {"PREFECT_API_SSL_CERT_FILE": str(proxy.certificate), "FORGE_STORE": str(tmp_path / "store")}
    command = [str(Path(sys.executable).with_name("forge")), "train", str(ROOT / "configs" / "quickstart.yaml")]
    changes = ["steps=1", "eval.prompts=0", "run.id=behind-tls", "warm_start.steps=5"]
    done = subprocess.run(
        [*command, *changes], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert proxy.url.removesuffix("/api") in done.stderr + done.stdout, "it used another server"
    (run,) = asked(proxy, "flow_runs/filter")
    assert (run["name"], run["state_type"]) == ("behind-tls", "COMPLETED")
    deadline, events = time.monotonic() + 30, set()
    while "prefect.task-run.Completed" not in events:  # the server stores what it has received in batches
        assert time.monotonic() < deadline, f"events come over a WebSocket: {events}"
        time.sleep(0.5)
        events = {event["event"] for event in asked(proxy, "events/filter")["events"]}


def asked(proxy: Proxy, path: str) -> Any:
    trusted = ssl.create_default_context(cafile=str(proxy.certificate))
    user, _, password = PASSWORD.partition(":")
    reply = httpx.post(f"{proxy.url}/{path}", json={}, auth=(user, password), verify=trusted)
    reply.raise_for_status()
    return reply.json()

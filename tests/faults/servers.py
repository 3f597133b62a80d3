"""Servers that can be killed and started again where they were: the same folder, the same address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from flows.home import QUIET
from forge_core.store import StoreError, open_store
from tests.faults.processes import FORGE
from tests.fixtures_prefect import answers, with_tables
from tests.fixtures_s3 import S3Server, _command, _die_with_parent, _free_ports, _users, _wait_until_ready

START_S = 180.0


class Server:
    """One process: ``environment`` is that of its clients."""

    name: str
    environment: dict[str, str]

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.start()

    def kill(self) -> None:
        """``kill -9``."""
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        """Until it answers."""
        raise NotImplementedError

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def _spawn(self, command: list[str], environment: dict[str, str]) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, preexec_fn=_die_with_parent
            )


class Prefect(Server):
    """``forge server``, as an operator starts it."""

    name = "prefect server"

    def __init__(self, folder: Path) -> None:
        (self._port,) = _free_ports(1)
        url = f"http://127.0.0.1:{self._port}/api"
        self.environment = {"PREFECT_API_URL": url, "PREFECT_HOME": str(folder / "client"), **QUIET}
        super().__init__(folder)

    def start(self) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        command = [str(FORGE), "server", "--port", str(self._port)]
        self._spawn(command, {**clean, "FORGE_HOME": str(with_tables(self.folder))})
        deadline = time.monotonic() + START_S
        while not answers(self.environment["PREFECT_API_URL"]):
            assert self.process.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)


class S3(Server):
    """SeaweedFS with the bucket ``forge``."""

    name = "s3 server"

    def __init__(self, folder: Path) -> None:
        (port,) = _free_ports(1)
        self._server = S3Server(f"http://127.0.0.1:{port}")
        self.environment = self._server.environment
        self._arguments = _command(folder, port, 64)
        self._has_bucket = False
        os.environ.update(self.environment)  # this process looks at the store too
        super().__init__(folder)

    def start(self) -> None:
        (self.folder / "users.json").write_text(json.dumps(_users(self._server, {})))
        self._spawn(self._arguments, {**os.environ, "HOME": str(self.folder)})
        if not self._has_bucket:
            _wait_until_ready(self._server, self.process, self.folder / "server.log")
            self._has_bucket = True
        store, deadline = open_store("s3://forge/ready"), time.monotonic() + START_S
        while True:
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()[-3000:]
            with suppress(StoreError):
                return store.put_json("ready.json", {})

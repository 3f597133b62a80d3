"""One real Prefect server for the tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from flows.server import ServerHandle, ensure_server


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    """A server of this test session; Prefect here and in subprocesses uses it. It ends with the session."""
    before = {name: os.environ.pop(name, None) for name in ("PREFECT_API_URL", "PREFECT_HOME", "FORGE_HOME")}
    home = tmp_path_factory.mktemp("forge-home")
    os.environ["FORGE_HOME"] = str(home)
    handle = ensure_server(home)
    yield handle
    handle.stop()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value

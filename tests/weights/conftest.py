"""A cache of weights that no other test uses, and a store whose requests a test can watch."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.store import Store, open_store
from forge_core.weights.host_cache import VARIABLE, HostCache
from tests.fixtures_s3 import S3Server
from tests.store.conftest import memory, store, uri  # noqa: F401  (fixtures)
from tests.store.faulty_proxy import FaultyProxy, faulty_proxy


@pytest.fixture(autouse=True)
def cache_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "weights-cache"))


@pytest.fixture
def cache(tmp_path: Path) -> HostCache:
    return HostCache(tmp_path / "cache")


@pytest.fixture
def proxied(
    s3_server: S3Server, s3_store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FaultyProxy, Store]]:
    with faulty_proxy(s3_server.endpoint) as (proxy, endpoint):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield proxy, open_store(f"{s3_store_uri}/{uuid.uuid4().hex}")
        proxy.gate.set()

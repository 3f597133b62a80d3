"""Stores on all three backends, each with a root that no other test uses."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from forge_core.store import Store, open_store

S3 = pytest.param("s3", marks=pytest.mark.server)


@pytest.fixture
def memory() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(params=["file", "memory", S3])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_store_uri')}/{uuid.uuid4().hex}"
    return f"file://{tmp_path}/store" if request.param == "file" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def store(uri: str) -> Store:
    return open_store(uri)

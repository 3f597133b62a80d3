"""The policy in docs/object-storage.md is enough for all that Forge asks of a bucket, and no action of it too much."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.doctor_store import store_checks
from forge_core.store import StoreError, open_store
from tests.fixtures_s3 import BUCKET, S3Server, seaweedfs

pytestmark = pytest.mark.server

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "object-storage.md"
POLICY = json.loads(re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), flags=re.S)[0].replace("BUCKET", BUCKET))
ACTIONS = [action for statement in POLICY["Statement"] for action in statement["Action"]]
NOT_ASKED_FOR = {"s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"}  # by this server; by Amazon's
STORE = f"s3://{BUCKET}/forge"


def without(action: str) -> str:
    policy: dict[str, Any] = json.loads(json.dumps(POLICY))
    for statement in policy["Statement"]:
        statement["Action"] = [name for name in statement["Action"] if name != action]
    return json.dumps(policy)


def user(action: str) -> str:
    return "without-" + action.removeprefix("s3:").lower()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    policies = {"least": json.dumps(POLICY), **{user(action): without(action) for action in ACTIONS}}
    with seaweedfs(tmp_path_factory.mktemp("iam"), policies=policies) as server:
        yield server


def become(server: S3Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": f"{name}-secret"}
    for variable, value in {**server.environment, **keys}.items():
        monkeypatch.setenv(variable, value)


def use_everything(root: str, large: Path) -> None:
    """Each kind of request that Forge sends."""
    store = open_store(root)
    store.publish("o/", {"large": large, "small": b"x"}, request="r")
    store.put_json("beat", {"n": 1})
    assert store.open_published("o/").read("small") == b"x"
    assert store.exists("beat")
    assert store.list("o")
    assert store.folders("")
    assert store.now() >= store.written_at("beat") - 1
    upload = store._backend._fs.call_s3("create_multipart_upload", Bucket=BUCKET, Key="forge/dead")  # type: ignore[attr-defined]
    (unfinished,) = [found for found in store.unfinished() if found.handle == upload["UploadId"]]
    store.discard(unfinished)
    for key in store.list("o"):
        store.delete(key)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(bytes(101 * 2**20))
    return path


def test_the_policy_is_enough(server: S3Server, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become(server, "least", monkeypatch)
    use_everything(STORE, large)
    assert all(check.ok for check in store_checks(STORE))


@pytest.mark.parametrize("root", [f"s3://{BUCKET}/other", "s3://another/forge"])
def test_the_policy_lets_nobody_elsewhere(server: S3Server, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    become(server, "least", monkeypatch)
    with pytest.raises(StoreError, match="S3 refused"):
        open_store(root)


@pytest.mark.parametrize("action", sorted({*ACTIONS} - NOT_ASKED_FOR))
def test_each_action_is_needed(server: S3Server, action: str, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become(server, user(action), monkeypatch)
    with pytest.raises(StoreError, match=r"S3 refused .*read, write, list and delete in the bucket"):
        use_everything(STORE, large)

"""What only a real S3 server can show: lost replies, passing failures, access (more in test_s3_faults.py)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import botocore.auth
import pytest

from forge_core.store import Store, StoreError, open_store
from tests.fixtures_s3 import S3Server
from tests.store.faulty_proxy import Fault, FaultyProxy, faulty_proxy

pytestmark = pytest.mark.server

LOST = Fault("PUT", "key", forward=True)  # the server takes the request, the reply is lost
UNAVAILABLE = Fault("PUT", "key", forward=False, status=503)
RESET = Fault("PUT", "key", forward=False)


@pytest.fixture
def proxied(
    s3_server: S3Server, s3_store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FaultyProxy, Store]]:
    with faulty_proxy(s3_server.endpoint) as (proxy, endpoint):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield proxy, open_store(f"{s3_store_uri}/{uuid.uuid4().hex}")


def create_json(store: Store) -> bool:
    return store.put_new_json("key", {"by": "me"})


def create_bytes(store: Store) -> bool:
    return store.put_new("key", b"mine")


@pytest.mark.parametrize("create", [create_json, create_bytes])
def test_a_writer_whose_reply_was_lost_learns_that_it_won(
    proxied: tuple[FaultyProxy, Store], create: Callable[[Store], bool]
) -> None:
    proxy, store = proxied
    proxy.faults = [LOST]
    assert create(store)
    assert not proxy.faults
    assert tuple(method for method, path in proxy.requests if path.endswith("/key"))[-2:] == ("PUT", "GET")
    assert not create(store)


def test_a_writer_whose_reply_was_lost_after_another_had_won_learns_that_it_lost(
    proxied: tuple[FaultyProxy, Store],
) -> None:
    proxy, store = proxied
    assert store.put_new_json("key", {"by": "me"})
    proxy.faults = [LOST, RESET]
    assert not store.put_new_json("key", {"by": "me"})


@pytest.mark.parametrize("fault", [UNAVAILABLE, RESET, Fault("PUT", "key", forward=False, status=409)])
def test_passing_failures_are_tried_again(proxied: tuple[FaultyProxy, Store], fault: Fault) -> None:
    proxy, store = proxied
    proxy.faults = [fault, fault]
    assert store.put_new_json("key", {"n": 1})
    assert store.read_json("key") == {"n": 1}


def test_reads_heads_listings_and_deletes_survive_a_passing_failure(proxied: tuple[FaultyProxy, Store]) -> None:
    proxy, store = proxied
    store.put_new("key", b"x")
    unavailable = [Fault(method, part, False, 500) for method in ("GET", "HEAD", "DELETE") for part in ("key",)]
    proxy.faults = [*unavailable, Fault("GET", "list-type", False, 503)]
    assert store.read("key") == b"x"
    assert store.exists("key")
    assert store.list("") == ["key"]
    store.delete("key")
    assert not proxy.faults
    assert not store.exists("key")


def test_a_lasting_failure_is_an_error_that_names_the_key(
    proxied: tuple[FaultyProxy, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, store = proxied
    monkeypatch.setattr("forge_core.store.s3.FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("forge_core.store.s3.ATTEMPTS", 2)
    proxy.faults = [UNAVAILABLE] * 100
    with pytest.raises(StoreError, match=r"key in the store s3://.*: S3 failed .*check the server"):
        store.put_new("key", b"x")


def test_a_server_that_ignores_the_condition_is_refused(
    s3_server: S3Server, s3_store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_proxy(s3_server.endpoint) as (proxy, endpoint):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        proxy.faults = [Fault("PUT", "probe", forward=True, status=200)] * 2
        with pytest.raises(StoreError, match="ignores If-None-Match: use one that enforces conditional PUT"):
            open_store(f"{s3_store_uri}/{uuid.uuid4().hex}")


def refused(uri: str, message: str, within_s: float = 10.0) -> None:
    started = time.monotonic()
    with pytest.raises(StoreError, match=message):
        open_store(uri)
    assert time.monotonic() - started < within_s


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_name_their_settings(s3_store_uri: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "wrong")
    refused(f"{s3_store_uri}/{uuid.uuid4().hex}", "S3 refused .*check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")


def test_missing_credentials_name_their_settings(
    s3_store_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    refused(f"{s3_store_uri}/{uuid.uuid4().hex}", "no S3 credentials .*: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS")


@pytest.mark.parametrize("user", ["environment", "plain_environment"])
def test_a_missing_bucket_is_named_and_not_created(
    s3_server: S3Server, s3_store_uri: str, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    for name, value in getattr(s3_server, user).items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        refused("s3://no-such-bucket/x", "the bucket no-such-bucket of the store .* does not exist: create it, or set")


def test_a_user_without_admin_rights_can_use_an_existing_bucket(
    s3_server: S3Server, s3_store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.plain_environment.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"{s3_store_uri}/{uuid.uuid4().hex}")
    store.publish("e/1", {"a": b"x"}, request="r")
    assert store.open_published("e/1").read("a") == b"x"


def test_a_user_who_may_only_read_is_told_what_it_lacks(
    s3_server: S3Server, s3_store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(s3_store_uri).put_json("readable", {"a": 1})
    for name, value in s3_server.reader_environment.items():
        monkeypatch.setenv(name, value)
    refused(f"{s3_store_uri}/{uuid.uuid4().hex}", "S3 refused .*may read, write, list and delete in the bucket forge")
    assert open_store(s3_store_uri, probe=False).read_json("readable") == {"a": 1}


def test_a_clock_that_is_an_hour_off_is_named(s3_store_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = botocore.auth.get_current_datetime
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: now() + timedelta(hours=1))
    refused(f"{s3_store_uri}/{uuid.uuid4().hex}", "S3 refused .RequestTimeTooSkewed.: set this machine's clock")


def test_an_endpoint_where_nobody_answers_is_named(s3_store_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    refused(f"{s3_store_uri}/{uuid.uuid4().hex}", "no S3 server answers .*check AWS_ENDPOINT_URL")

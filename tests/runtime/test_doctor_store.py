"""What ``forge doctor --store`` says about a store, and that it leaves nothing there."""

from __future__ import annotations

import re
import time
import uuid

import pytest

from flows.doctor_store import store_checks
from forge_core.store import open_store
from tests.fixtures_s3 import S3Server
from tests.store.conftest import uri  # noqa: F401  (fixture)


def test_a_good_store_is_measured_and_left_as_it_was(uri: str) -> None:  # noqa: F811
    open_store(uri).put_new("runs/first/run.json", b"{}")
    found = {check.name: check for check in store_checks(uri)}
    assert all(check.ok for check in found.values()), found
    assert found["store"].detail == f"{uri}: readable, writable, refuses to overwrite"
    assert re.match(r"within \d s of this machine's", found["store: clock"].detail)
    assert re.match(r"read [\d.]+ ms, look-up [\d.]+ ms", found["store: latency"].detail)
    assert re.match(r"[1-9]\d* MiB/s up, [1-9]\d* MiB/s down", found["store: throughput"].detail)
    assert found["store: listing"].detail.startswith("1 objects in ")
    assert open_store(uri).list("") == ["runs/first/run.json"]


@pytest.mark.parametrize(("ahead_s", "words"), [(-3600.0, "3600 s ahead of"), (3600.0, "3600 s behind")])
def test_a_clock_that_differs_is_named(
    uri: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    ahead_s: float,
    words: str,
) -> None:
    clock = time.time
    if uri.startswith("memory"):
        pytest.skip("a store in memory has this process's clock")
    monkeypatch.setattr(time, "time", lambda: clock() + ahead_s)
    check = next(check for check in store_checks(uri) if check.name == "store: clock")
    assert (check.ok, words in check.detail.replace("3599", "3600").replace("3601", "3600")) == (False, True)
    assert "NTP" in check.remedy


@pytest.mark.server
def test_of_a_store_that_cannot_be_used_only_that_is_said(
    s3_server: S3Server, s3_store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    (check,) = store_checks(f"{s3_store_uri}/{uuid.uuid4().hex}")
    assert (check.ok, check.essential, "check AWS_ACCESS_KEY_ID" in check.detail) == (False, True, True)


@pytest.mark.server
def test_a_user_who_may_only_read_is_told(
    s3_server: S3Server, s3_store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.reader_environment.items():
        monkeypatch.setenv(name, value)
    (check,) = store_checks(f"{s3_store_uri}/{uuid.uuid4().hex}")
    assert (check.ok, "may read, write, list and delete in the bucket forge" in check.detail) == (False, True)

"""A real S3 server behind a network that fails: every operation ends in success or a clear error, never torn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge_core.runs.garbage import LEFT_S, collect_leftovers
from forge_core.store import CorruptObject, File, Store, StoreError, open_store, s3
from tests.fixtures_s3 import S3Server
from tests.store.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.weights.objects import until

pytestmark = pytest.mark.server

ANY = Fault("", "", forward=False)
FAULTS = {
    "500": replace(ANY, status=500),
    "503": replace(ANY, status=503),
    "a reset before the server knows": ANY,
    "a reset after the server has done it": replace(ANY, forward=True),
    "a time-out before the server knows": replace(ANY, silent_s=1.5),
    "a time-out after the server has done it": replace(ANY, forward=True, silent_s=1.5),
    "an answer cut in its middle": replace(ANY, forward=True, cut=True),
}


@pytest.fixture
def proxied(
    s3_server: S3Server, s3_store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FaultyProxy, Store]]:
    monkeypatch.setattr(s3, "FIRST_WAIT_S", 0.01)
    with faulty_proxy(s3_server.endpoint) as (proxy, endpoint):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield proxy, open_store(f"{s3_store_uri}/{uuid.uuid4().hex}")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients wait one second for an answer."""
    monkeypatch.setitem(s3._CONFIG, "read_timeout", 1)


def deleted(store: Store) -> bool:
    store.delete("there")
    return store.exists("there")


def overwritten(store: Store) -> Any:
    store.put_json("beat", {"n": 2})
    return store.read_json("beat")


def copied(store: Store, folder: Path) -> bytes:
    folder.mkdir(exist_ok=True)
    store.open_published("o/").copy_to(folder)
    return (folder / "rows").read_bytes()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.usefixtures("impatient")
def test_every_verb_survives(proxied: tuple[FaultyProxy, Store], fault: Fault, tmp_path: Path) -> None:
    proxy, store = proxied
    body = os.urandom(200_000)
    store.put_new("there", b"x")
    store.put_json("beat", {"n": 1})
    store.publish("o/", {"rows": body}, request="r")
    verbs: dict[str, tuple[str, str, Callable[[], Any], Any]] = {
        "put_new": ("PUT", "/new", lambda: store.put_new("new", b"mine"), True),
        "put_new_json": ("PUT", "/json", lambda: store.put_new_json("json", {"a": 1}), True),
        "put_new of what is there": ("PUT", "/there", lambda: store.put_new("there", b"mine"), False),
        "put_json": ("PUT", "/beat", lambda: overwritten(store), {"n": 2}),
        "read": ("GET", "/there", lambda: store.read("there"), b"x"),
        "read_range": ("GET", "/o/rows", lambda: store.read_range(_rows(store).key, 5, 9), body[5:9]),
        "download": ("GET", "/o/rows", lambda: copied(store, tmp_path / "copy"), body),
        "exists": ("HEAD", "/there", lambda: store.exists("there"), True),
        "list": ("GET", "list-type", lambda: "there" in store.list(""), True),
        "folders": ("GET", "delimiter", lambda: "o" in store.folders(""), True),
        "written_at": ("HEAD", "/there", lambda: abs(store.written_at("there") - time.time()) < 60, True),
        "publish": ("PUT", "/p/rows", lambda: store.publish("p/", {"rows": b"x"}, request="r").content != "", True),
        "manifest": ("PUT", "/q/manifest", lambda: store.publish("q/", {"rows": b"x"}, request="r").request, "r"),
        "delete": ("DELETE", "/there", lambda: deleted(store), False),
    }
    for name, (method, part, use, expected) in verbs.items():
        if fault.silent_s and name not in ("put_new", "read", "download", "put_new of what is there", "manifest"):
            continue  # waiting takes its time: one of each kind of request
        proxy.faults = [replace(fault, method=method, part=part)]
        assert use() == expected, name
        assert not proxy.faults, name
    assert store.open_published("q/").read("rows") == b"x"


@pytest.mark.parametrize("fault", [FAULTS["503"], FAULTS["a reset after the server has done it"]])
def test_an_outage_that_outlasts_the_clients_own_tries_is_survived(
    proxied: tuple[FaultyProxy, Store], fault: Fault
) -> None:
    proxy, store = proxied
    proxy.faults = [replace(fault, method="PUT", part="/new")] * 7
    assert store.put_new("new", b"mine")
    assert not proxy.faults
    assert store.read("new") == b"mine"


def _rows(store: Store) -> File:
    return store.open_published("o/").manifest.files[0]


def test_the_second_page_of_a_listing_is_asked_for_again(proxied: tuple[FaultyProxy, Store]) -> None:
    proxy, store = proxied
    keys = [f"run/{number:04d}" for number in range(1_001)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store._backend.write(key, b"x"), keys))
    proxy.faults = [Fault("GET", "continuation-token", False, 503), Fault("GET", "continuation-token", True)]
    assert store.list("run") == keys
    assert not proxy.faults


def test_an_answer_that_is_whole_but_wrong_is_an_error_that_names_the_key(proxied: tuple[FaultyProxy, Store]) -> None:
    proxy, store = proxied
    key = store.publish("o/", {"rows": b"x" * 100}, request="r").files[0].key
    proxy.faults = [Fault("GET", "/o/rows", False, 200, b"x" * 50)]
    with pytest.raises(CorruptObject, match=rf"{key} .* is damaged: it has 50 bytes"):
        store.open_published("o/").read("rows")
    assert store.open_published("o/").read("rows") == b"x" * 100


# Files that are uploaded in parts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.bin"
    path.write_bytes(os.urandom(2**20) * 101)
    return path


GONE = b"<?xml version='1.0'?><Error><Code>NoSuchUpload</Code><Message>The upload does not exist</Message></Error>"
COMPLETION = Fault("POST", "uploadId", forward=True)
IN_PARTS = {
    "the completion's reply is lost": [COMPLETION],
    "the completion's reply is lost, and the server then knows no such upload": [
        COMPLETION,
        replace(COMPLETION, forward=False, status=404, body=GONE),
    ],
    "the completion fails": [replace(COMPLETION, forward=False, status=500)] * 4,
    "the first request's reply is lost": [Fault("POST", "uploads", forward=True)],
    "parts fail": [
        Fault("PUT", "partNumber=1", False, 503),
        Fault("PUT", "partNumber=2", forward=False),
        Fault("PUT", "partNumber=3", forward=True),
    ],
}


@pytest.mark.parametrize("faults", IN_PARTS.values(), ids=IN_PARTS.keys())
def test_a_large_file_arrives_whole_although(
    proxied: tuple[FaultyProxy, Store], faults: list[Fault], large: Path
) -> None:
    proxy, store = proxied
    proxy.faults = list(faults)
    manifest = store.publish("w/", {"large.bin": large}, request="r")
    assert not proxy.faults
    assert store.sizes("w")[manifest.files[0].key] == large.stat().st_size
    published = store.open_published("w/")
    assert published.checked(manifest.files[0], store.read(manifest.files[0].key))


def test_a_large_file_that_cannot_be_completed_is_an_error_and_no_object(
    proxied: tuple[FaultyProxy, Store], large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, store = proxied
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    proxy.faults = [replace(COMPLETION, forward=False, status=503)] * 50
    with pytest.raises(StoreError, match=r"w/large-\w+.bin in the store s3://.*: S3 failed"):
        store.publish("w/", {"large.bin": large}, request="r")
    proxy.faults = []
    assert store.list("w") == []
    assert not store.published("w/")
    assert store.unfinished() == []


UPLOAD = """
import sys
from pathlib import Path
from forge_core.store import open_store
open_store(sys.argv[1]).publish("w/", {"large.bin": Path(sys.argv[2])}, request="r")
"""


def test_what_a_killed_upload_leaves_is_no_object_and_is_collected_after_a_day(
    proxied: tuple[FaultyProxy, Store], large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, store = proxied
    proxy.faults = [replace(COMPLETION, silent_s=60.0, forward=False)]
    process = subprocess.Popen([sys.executable, "-c", UPLOAD, store.uri, str(large)])
    until(lambda: not proxy.faults)
    process.kill()
    process.wait()
    assert store.list("w") == []
    (upload,) = store.unfinished()
    assert upload.size == large.stat().st_size
    assert collect_leftovers(store) == ()
    now = store.now
    monkeypatch.setattr(store, "now", lambda: now() + LEFT_S + 5)
    assert [garbage.bytes for garbage in collect_leftovers(store, dry_run=True)] == [large.stat().st_size]
    assert len(store.unfinished()) == 1
    assert [garbage.bytes for garbage in collect_leftovers(store)] == [large.stat().st_size]
    assert store.unfinished() == []

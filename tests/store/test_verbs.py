"""The verbs keep their promises on every backend."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from forge_core.overdue import Overdue
from forge_core.stop import Stopped, StopToken
from forge_core.store import CorruptObject, IdentityError, NotFound, Store, StoreError, open_store
from forge_core.store.backend import PUT_NEW_LIMIT
from forge_core.store.s3 import S3Backend


def test_put_new_creates_once_and_never_overwrites(store: Store) -> None:
    assert store.put_new("a/key", b"first")
    assert not store.put_new("a/key", b"second")
    assert store.read("a/key") == b"first"


def test_json_bodies_of_two_writers_differ_and_readers_see_no_nonce(store: Store) -> None:
    assert store.put_new_json("one", {"b": [1, 2], "a": "ü"})
    assert store.put_new_json("two", {"b": [1, 2], "a": "ü"})
    assert store.read_json("one") == store.read_json("two") == {"a": "ü", "b": [1, 2]}
    assert store.read("one") != store.read("two")


def test_an_empty_json_object_has_a_body(store: Store) -> None:
    assert store.put_new_json("empty", {})
    assert store.read("empty")
    assert store.read_json("empty") == {}


@pytest.mark.parametrize("size", [0, PUT_NEW_LIMIT])
def test_put_new_refuses_bodies_that_cannot_be_created_atomically(memory: Store, size: int) -> None:
    with pytest.raises(StoreError, match=f"key: put_new takes 1 to 8388607 bytes, got {size}: publish larger"):
        memory.put_new("key", bytes(size))


def test_values_that_json_cannot_hold_are_named(memory: Store) -> None:
    with pytest.raises(StoreError, match="run/x: not a JSON value"):
        memory.put_new_json("run/x", {"loss": float("nan")})
    with pytest.raises(StoreError, match="the key 'nonce' is the store's own"):
        memory.put_new_json("run/x", {"nonce": 1})
    assert not memory.exists("run/x")


def test_advice_is_overwritten_and_the_last_writer_wins(store: Store) -> None:
    for beat in range(3):
        store.put_json("workers/generator-1.json", {"beat": beat})
        assert store.read_json("workers/generator-1.json") == {"beat": beat}
    assert not store.put_new_json("workers/generator-1.json", {"beat": 9})
    assert store.list("") == ["workers/generator-1.json"]


def test_a_reader_of_advice_never_sees_half_a_value(store: Store) -> None:
    values = [{"at": number, "text": str(number) * 5000} for number in range(2)]
    store.put_json("beat", values[0])
    done = threading.Event()

    def write() -> None:
        for number in range(20):
            store.put_json("beat", values[number % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert store.read_json("beat") in values
    writer.join()


def test_advice_that_json_cannot_hold_is_named(memory: Store) -> None:
    with pytest.raises(StoreError, match="beat: not a JSON value"):
        memory.put_json("beat", {"age": float("nan")})
    with pytest.raises(StoreError, match="the key 'nonce' is the store's own"):
        memory.put_json("beat", {"nonce": 1})


def test_reading_what_is_not_there_names_the_key(store: Store) -> None:
    with pytest.raises(NotFound, match="no/such: no such object in the store") as caught:
        store.read("no/such")
    assert caught.value.key == "no/such"
    assert not store.exists("no/such")


def test_existence_is_of_a_full_key_not_of_a_prefix(store: Store) -> None:
    store.put_new("folder/key", b"x")
    assert not store.exists("folder")
    assert not store.exists("folder/ke")
    assert store.exists("folder/key")


def test_listing_is_sorted_fresh_and_stays_inside_its_folder(store: Store) -> None:
    for key in ("run/b/2", "run/b/10", "run/a", "runner/c"):
        store.put_new(key, b"x")
    assert store.list("run") == store.list("run/") == ["run/a", "run/b/10", "run/b/2"]
    assert open_store(store.uri).put_new("run/d", b"x")
    assert store.list("run") == ["run/a", "run/b/10", "run/b/2", "run/d"]
    assert store.list("ru") == []
    assert store.list("run/a") == []
    assert store.list("") == ["run/a", "run/b/10", "run/b/2", "run/d", "runner/c"]


def test_the_total_is_that_of_all_objects(store: Store) -> None:
    assert store.total() == sum(store.sizes("").values())
    for key, size in (("a/1", 10), ("a/b/2", 200), ("c", 3000)):
        store.put_new(key, b"x" * size)
    assert store.total() == 3210


def test_a_bucket_is_counted_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def page(backend: S3Backend, method: str, folder: str, **more: Any) -> dict[str, Any]:
        n = more.get("ContinuationToken", 0)
        items = [{"Key": f"{'x' * 100}/{n}/{i}", "Size": 3} for i in range(1000)]
        return {"Contents": items, "IsTruncated": n < 29, "NextContinuationToken": n + 1}

    monkeypatch.setattr(S3Backend, "_list_page", page)  # of a server with thirty thousand objects
    store = Store(S3Backend("bucket", ""))
    tracemalloc.start()
    total, (_, most) = store.total(), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 90_000
    assert most < 2 * 2**20


def test_deleted_keys_are_gone_and_deleting_again_does_nothing(store: Store) -> None:
    store.put_new("a/key", b"x")
    store.delete("a/key")
    store.delete("a/key")
    assert not store.exists("a/key")
    assert store.list("") == []
    assert store.put_new("a/key", b"y")


@pytest.mark.parametrize(
    "key",
    ["", "/", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a/.", "a\\b", "a\nb", "a\0b", ".tmp/x", "~/x"],
)
def test_keys_cannot_leave_the_root(memory: Store, tmp_path: Path, key: str) -> None:
    for store in (memory, open_store(str(tmp_path / "store"))):
        for use in (store.read, store.exists, store.delete, store.read_json, lambda k, s=store: s.put_new(k, b"x")):
            with pytest.raises(StoreError, match="is not a key"):
                use(key)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "a\\b", "a\nb"])
def test_file_names_cannot_leave_their_object(memory: Store, name: str) -> None:
    with pytest.raises(StoreError, match="is not a key"):
        memory.publish("ok", {"fine": b"x", name: b"x"}, request="r")
    assert memory.list("") == []


@pytest.mark.parametrize("prefix", ["..", "a/../..", "/a", "a//"])
def test_prefixes_cannot_leave_the_root(memory: Store, prefix: str) -> None:
    for use in (memory.list, memory.published, memory.open_published):
        with pytest.raises(StoreError, match="is not a key"):
            use(prefix)
    with pytest.raises(StoreError, match="is not a key"):
        memory.publish(prefix, {"a": b"x"}, request="r")


@pytest.mark.parametrize("uri", ["gs://bucket/x", "s3://", "memory://", "file://relative/x", "s3://bucket/../x"])
def test_a_store_that_cannot_be_opened_is_named(uri: str) -> None:
    with pytest.raises(StoreError, match=r"store '|is not a key"):
        open_store(uri)


def test_published_files_have_digests_in_their_names_and_plain_names_for_readers(store: Store, tmp_path: Path) -> None:
    big = tmp_path / "weights.bin"
    big.write_bytes(bytes(range(256)) * 10_000)
    files = {"model.safetensors": big, "sub/config.json": b"{}", ".metadata": b"hidden"}
    manifest = store.publish("w/1", files, request="r", provenance={"host": "here"})
    published = store.open_published("w/1/", request="r")
    assert published.manifest == manifest
    assert published.files == [".metadata", "model.safetensors", "sub/config.json"]
    assert published.read(".metadata") == b"hidden"
    assert published.read("model.safetensors") == big.read_bytes()
    assert manifest.provenance == {"host": "here"}
    sha = manifest.file("model.safetensors").sha256
    assert manifest.file("model.safetensors").key == f"w/1/model-{sha[:12]}.safetensors"
    assert set(store.list("w/1")) == {"w/1/manifest.json"} | {file.key for file in manifest.files}


def test_content_is_a_digest_of_names_and_bytes_only(memory: Store) -> None:
    one = memory.publish("1", {"a": b"x", "b": b"y"}, request="r1", provenance={"at": 1})
    same = memory.publish("2", {"b": b"y", "a": b"x"}, request="r2")
    renamed = memory.publish("3", {"a": b"x", "c": b"y"}, request="r1")
    changed = memory.publish("4", {"a": b"x", "b": b"z"}, request="r1")
    assert one.content == same.content
    assert len({one.content, renamed.content, changed.content}) == 3


def test_the_loser_of_a_publication_adopts_the_winner(store: Store) -> None:
    winner = store.publish("e/1", {"rows": b"winner"}, request="r", provenance={"by": 1})
    assert store.publish("e/1", {"rows": b"loser!"}, request="r", provenance={"by": 2}) == winner
    assert store.open_published("e/1").read("rows") == b"winner"


def test_another_request_under_one_name_is_refused(store: Store) -> None:
    store.publish("e/1", {"rows": b"x"}, request="asked")
    with pytest.raises(IdentityError, match=r"e/1/ .* was made for another request \(asked, not other\)"):
        store.publish("e/1", {"rows": b"x"}, request="other")
    with pytest.raises(IdentityError, match="e/1/"):
        store.open_published("e/1", request="other")


def test_without_a_manifest_there_is_no_object(store: Store) -> None:
    store.put_new("e/1/rows-123.parquet", b"uploaded by a writer that died")
    assert not store.published("e/1")
    with pytest.raises(NotFound, match=r"e/1/manifest.json: nothing is published under this prefix"):
        store.open_published("e/1")
    store.publish("e/1", {"rows.parquet": b"x"}, request="r")
    assert store.published("e/1")


def _damage(store: Store, key: str, body: bytes | None) -> None:
    store.delete(key)
    if body is not None:
        store.put_new(key, body)


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"xx", "is damaged: it has 2 bytes"), (b"yyy", "is damaged: it has 3 bytes"), (None, "is missing although")],
)
def test_torn_changed_and_missing_files_are_named(store: Store, body: bytes | None, message: str) -> None:
    file = store.publish("e/1", {"rows.parquet": b"xxx"}, request="r").file("rows.parquet")
    _damage(store, file.key, body)
    with pytest.raises(CorruptObject, match=message) as caught:
        store.open_published("e/1").read("rows.parquet")
    assert file.key in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"prefix": "e/1/", "request": "r", "content": "wrong", "files": [], "provenance": {}}',
        b'{"prefix": "e/1/", "request": "r", "content": "x", "files": [{"name": "a"}], "provenance": {}}',
    ],
)
def test_a_damaged_manifest_is_named(memory: Store, body: bytes) -> None:
    memory.put_new("e/1/manifest.json", body)
    with pytest.raises(CorruptObject, match=r"e/1/manifest.json in the store memory://\w+ is not"):
        memory.open_published("e/1")


def test_a_manifest_cannot_point_outside_the_store(memory: Store) -> None:
    manifest = memory.publish("e/1", {"a": b"x"}, request="r").to_json()
    stolen = json.loads(json.dumps(manifest).replace('"key": "e/1/a', '"key": "../a'))
    memory.put_new_json("e/2/manifest.json", stolen)
    with pytest.raises(StoreError, match="is not a key"):
        memory.open_published("e/2")


def test_wait_for_returns_when_the_key_appears(store: Store) -> None:
    writer = threading.Timer(0.2, lambda: store.put_new("late", b"x"))
    writer.start()
    started = time.monotonic()
    store.wait_for("late", timeout_s=20)
    assert store.exists("late")
    assert time.monotonic() - started < 5
    writer.join()


def test_wait_for_ends_at_its_deadline_with_the_key(store: Store) -> None:
    started = time.monotonic()
    with pytest.raises(Overdue, match=r"never did not appear in the store .* within 0\.2 s"):
        store.wait_for("never", timeout_s=0.2)
    assert 0.2 <= time.monotonic() - started < 3


def test_wait_for_ends_when_the_run_is_stopped(memory: Store) -> None:
    stop = StopToken()
    threading.Timer(0.1, stop.set, ("Ctrl-C",)).start()
    with pytest.raises(Stopped, match="Ctrl-C"):
        memory.wait_for("never", timeout_s=60, stop=stop)


def test_an_object_uploaded_in_shares_is_the_one_published_whole(store: Store) -> None:
    whole = store.publish("whole/", {"a": b"1", "b": b"2", "shared": b"3"}, request="r")
    shares = [
        store.upload("shares/", {"b": b"2", "shared": b"3"}),
        store.upload("shares/", {"shared": b"3", "a": b"1"}),
    ]
    assert not store.published("shares/")
    manifest = store.publish_uploaded("shares/", [file for share in shares for file in share], request="r")
    assert (manifest.content, [f.name for f in manifest.files]) == (whole.content, ["a", "b", "shared"])
    assert store.open_published("shares/", request="r").read("b") == b"2"
    with pytest.raises(IdentityError):
        store.publish_uploaded("shares/", shares[0], request="other")


def test_shares_that_disagree_about_a_file_make_no_object(memory: Store) -> None:
    shares = [*memory.upload("torn/", {"config.json": b"1"}), *memory.upload("torn/", {"config.json": b"2"})]
    with pytest.raises(StoreError, match=r"two different files named 'config\.json'"):
        memory.publish_uploaded("torn/", shares, request="r")
    assert not memory.published("torn/")

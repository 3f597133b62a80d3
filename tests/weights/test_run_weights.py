"""The weights of a real run: fetched once a host, or not at all where they were published."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from forge_core.runs.initialise import initialise
from forge_core.store import Store
from tests.generation.conftest import make_folder
from tests.runs.harness import advance, new_run, reopened
from tests.store.faulty_proxy import FaultyProxy
from tests.weights.objects import until

pytestmark = [pytest.mark.engine, pytest.mark.server]


@pytest.mark.parametrize("pretrained", [False, True])
def test_one_hosts_engines_fetch_nothing_that_this_host_has_published(
    proxied: tuple[FaultyProxy, Store], tmp_path: Path, pretrained: bool
) -> None:
    proxy, store = proxied
    model = make_folder(tmp_path / "model") if pretrained else None
    before = {} if model is None else {path: path.read_bytes() for path in model.iterdir()}
    ctx = advance(new_run(store, "grpo.beta=0.1", *([f"model={model}"] if pretrained else [])), 1)
    folder = ctx.weights_dir(1)
    assert tmp_path / "weights-cache" in folder.parents
    until(lambda: not ctx.weights._prefetches)  # the commit started one
    assert ctx.generator(1).get_version() == 1
    assert [path for path in proxy.ranges if "/weights/" in path] == []
    assert all(path.read_bytes() == content and path.stat().st_mode & 0o200 for path, content in before.items())
    ctx.close()
    assert not any(path.is_dir() for path in folder.parent.iterdir())


def test_another_hosts_engines_fetch_every_file_once(
    proxied: tuple[FaultyProxy, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, store = proxied
    ctx = advance(new_run(store, "grpo.beta=0.1"), 1)
    monkeypatch.setenv("FORGE_WEIGHTS_CACHE", str(tmp_path / "another"))
    other = reopened(ctx)
    for version in (0, 1, 0):
        assert tmp_path / "another" in other.weights_dir(version).parents
    manifests = [store.open_published(ctx.ledger.weights_prefix(version)).manifest for version in (0, 1)]
    expected = {file.key.removeprefix("runs/"): 1 for manifest in manifests for file in manifest.files}
    assert Counter(path.partition("/runs/")[2] for path in proxy.ranges if "/weights/" in path) == expected
    ctx.close()
    other.close()


def test_a_pretrained_model_is_neither_moved_nor_linked_into_a_store_of_files(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model")
    before = {path: path.stat() for path in model.iterdir()}
    ctx = new_run(str(tmp_path / "store"), f"model={model}")
    initialise(ctx)
    assert sorted(model.iterdir()) == sorted(before)
    for path, was in before.items():
        now = path.stat()
        assert (now.st_ino, now.st_nlink, now.st_mode) == (was.st_ino, 1, was.st_mode)
    assert ctx.weights_dir(0).is_dir()
    ctx.close()

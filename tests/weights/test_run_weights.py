"""The weights of a real run: fetched once a host, or not at all where the trainer is on this host."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from forge_core.store import Store
from tests.runs.harness import advance, new_run
from tests.store.faulty_proxy import FaultyProxy
from tests.weights.objects import until

pytestmark = [pytest.mark.engine, pytest.mark.server]


def test_one_hosts_engines_fetch_version_zero_once_and_trained_versions_never(
    proxied: tuple[FaultyProxy, Store], tmp_path: Path
) -> None:
    proxy, store = proxied
    ctx = advance(new_run(store, "grpo.beta=0.1"), 1)
    folder = ctx.weights_dir(1)
    assert tmp_path / "weights-cache" in folder.parents
    until(lambda: not ctx.weights._prefetches)  # the commit started one
    assert ctx.generator(1).get_version() == 1
    files = {file.key: 1 for file in store.open_published(ctx.ledger.weights_prefix(0)).manifest.files}
    fetched = Counter(path.partition("/runs/")[2] for path in proxy.ranges if "/weights/" in path)
    assert fetched == {key.removeprefix("runs/"): count for key, count in files.items()}
    ctx.close()
    assert not any(path.is_dir() for path in folder.parent.iterdir())

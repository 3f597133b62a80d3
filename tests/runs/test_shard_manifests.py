"""A process reads the manifest of a shard once, whatever it does with the shard; its files are checked each time."""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

from forge_core.runs.shard_manifests import ShardManifests
from forge_core.runs.training import train_batch
from forge_core.store import CorruptObject, IdentityError, NotFound, Store, layout
from forge_core.store.memory import MemoryBackend
from tests.runs import harness

SHARD = re.compile(r"/(episodes|rewards|reference)/(\d+)/[\d-]+/manifest\.json$")


class Counting(MemoryBackend):
    """Counts how often the manifests of shards are read."""

    def __init__(self) -> None:
        super().__init__(os.urandom(8).hex())
        self.reads: Counter[str] = Counter()

    def read(self, path: str) -> bytes:
        if SHARD.search(path):
            self.reads[path] += 1
        return super().read(path)


@pytest.mark.engine
def test_a_step_reads_each_manifest_of_its_shards_once_and_none_that_this_process_made():
    backend = Counting()
    ctx = harness.new_run(Store(backend), "grpo.beta=0.05", "max_staleness=1", "eval.prompts=0")
    harness.advance(ctx, 2)
    harness.make_batch(ctx, 2)
    ctx.close()
    assert not backend.reads
    other = harness.reopened(ctx)
    train_batch(other, 2)
    other.close()
    assert ctx.store.exists(layout.metrics("tiny", 2))
    assert {times for key, times in backend.reads.items() if "/00000002/" in key} == {1}
    assert len([key for key in backend.reads if "/00000002/" in key]) == 6
    # The replay since the checkpoint, and the metrics, which compare with the step before.
    assert set(backend.reads.values()) == {1}


def shard(store: Store, batch: int) -> str:
    prefix = layout.episodes("run", batch, 0, 0)
    store.publish(prefix, {"episodes.parquet": b"rows"}, request="r")
    return prefix


def test_what_is_remembered_is_checked_as_what_is_read():
    memory = Store(Counting())
    prefix = shard(memory, 0)
    shards = ShardManifests(memory, 2)
    (file,) = shards.open_published(prefix).manifest.files
    assert shards.open_published(prefix, request="r").read("episodes.parquet") == b"rows"
    with pytest.raises(IdentityError, match=f"{prefix} in the store .* was made for another request"):
        shards.open_published(prefix, request="another")
    memory._backend.write(file.key, b"torn")
    with pytest.raises(CorruptObject, match="is damaged"):
        shards.open_published(prefix).read("episodes.parquet")


def test_only_the_newest_batches_are_remembered_and_nothing_that_is_not_there():
    backend = Counting()
    store = Store(backend)
    shards = ShardManifests(store, 2)
    with pytest.raises(NotFound):
        shards.open_published(layout.episodes("run", 0, 0, 0))
    backend.reads.clear()
    prefixes = [shard(store, batch) for batch in range(3)]
    for prefix in (*prefixes, *prefixes[1:], prefixes[0], prefixes[0]):
        shards.open_published(prefix)
    assert [backend.reads[f"{prefix}manifest.json"] for prefix in prefixes] == [3, 1, 1]

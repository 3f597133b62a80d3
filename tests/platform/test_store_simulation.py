"""The simulation of many roles against one store, in small: eight generators and a trainer of two ranks over S3."""

from __future__ import annotations

import pytest

from benchmarks.store_simulation import simulate

pytestmark = pytest.mark.server


def test_what_a_step_asks_of_the_store_grows_with_its_shards_alone(s3_store_uri: str):
    shards = generators = 8
    result = simulate(
        f"{s3_store_uri}-simulated", generators=generators, ranks=2, scorers=2, steps=2, generate_s=1.0, train_s=0.3
    )
    sampled = result["requests_per_step_by_role"]["generator"]
    assert sampled["PUT episodes"] == 2 * shards, "each shard once: a file and its manifest"
    graded = result["requests_per_step_by_role"]["scorer"]
    assert graded["PUT rewards"] == 2 * shards, "each shard once, whichever scorer does it"
    assert result["requests_per_step_by_role"]["trainer"]["PUT weights"] == 3, "a file of each rank, and the manifest"
    assert result["claims_tried"] - result["claim_collisions"] == 2 * 2 * shards, "one generator and one scorer each"
    assert result["claim_collisions"] < generators * shards, "not everybody races for every shard"
    assert 0 < result["usd_per_step"] < 0.01

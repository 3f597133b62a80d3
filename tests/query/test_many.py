"""A million episodes: what benchmarks/query.py asks of ten."""

from __future__ import annotations

import tempfile

import pytest

from benchmarks.query import LIMIT_S, RUN, ask_all, generate
from forge_core.query import query
from forge_core.store import open_store

EPISODES = 1_000_000
COUNT = "SELECT count(*) AS n, count(DISTINCT batch) AS batches FROM rewards"


@pytest.mark.engine  # for its seconds
def test_a_filtered_aggregate_over_a_million_episodes_takes_seconds():
    with tempfile.TemporaryDirectory() as folder:  # hundreds of megabytes: not kept, as those of pytest are
        store = open_store(folder)
        generate(store, EPISODES, size=10_000)
        seconds = ask_all(store, threads=2)
        counts = query([RUN], COUNT, store=store).to_pylist()
    assert seconds["filtered aggregate"] < LIMIT_S
    assert seconds["filtered aggregate of episodes"] < LIMIT_S
    assert counts == [{"n": EPISODES, "batches": 25}]

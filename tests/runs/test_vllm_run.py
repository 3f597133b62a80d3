"""A run whose responses a real vLLM engine samples (starting it takes 10 to 25 s)."""

from __future__ import annotations

import pytest

from forge_core.data_model import METRICS, from_parquet
from forge_core.runs.episodes import read_episodes
from forge_core.store import layout
from tests.runs.harness import advance, new_run

pytestmark = pytest.mark.engine
PHASES = ("fetch", "stage", "pause", "load", "resume", "probe")
SETTINGS = [
    "generator.backend=vllm",
    "rollout.version=newest",
    "model.hidden_size=64",
    "model.head_dim=32",
    "steps=3",
    "checkpoint.interval=0",
    "eval.interval=1",
]


def test_a_run_on_vllm_trains_on_what_it_samples(tmp_path) -> None:
    ctx = new_run(str(tmp_path / "store"), *SETTINGS)
    advance(ctx, 3)
    entries = ctx.ledger.entries()
    assert [e["max_age"] for e in entries] == [0, 0, 0]
    assert all(e["episodes"]["planned"] == 32 and e["episodes"]["trained"] > 0 for e in entries)
    assert len({e["weights_digest"] for e in entries}) == 3
    for entry in entries:  # sampler and trainer agree, also after each swap of weights
        assert entry["metrics"]["mismatch/max_abs_logprob"] < 1e-4
    for entry in entries:
        for prefix in entry["shards"]["episodes"]:
            episodes = read_episodes(ctx.store, prefix)
            assert {e.policy_version for e in episodes} == {entry["batch"]}
            assert all(len(e.response_ids) == len(e.response_logprobs) > 0 for e in episodes)
    ctx.metric_log.close()
    table = ctx.store.read(layout.metrics(ctx.run_id, 2))
    seconds = {row["key"]: row["value"] for row in from_parquet(table, METRICS, "metrics") if row["source"] is None}
    assert all(seconds[f"generator_perf/update_weights/{phase}_duration_avg_s"] >= 0 for phase in PHASES)

"""Questions in SQL about many stored episodes: how long each takes, from the store alone.

    .venv/bin/python -m benchmarks.query --episodes 10000000 --threads 2

Claim: a filtered aggregate over 10 million episodes takes less than 5 seconds on two cores. Real: the tables as a run
publishes them (Parquet and manifests, ``--shard`` episodes a shard), and the questions as ``forge query`` asks them, in
a new connection each, the first one with an operating system that has just written the files. Generated: the episodes,
whose texts and tokens repeat while ids, rewards and lengths do not.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.machine import provenance, write
from forge_core.config import load_config
from forge_core.data_model import EPISODES, REWARDS, TRAINING
from forge_core.query import RunTables
from forge_core.runs.record import create_run
from forge_core.store import Store, layout, open_store

RUN, SHARDS, SAMPLES, LIMIT_S = "many", 4, 8, 5.0
QUESTIONS = {
    "filtered aggregate": (
        "SELECT batch, count(*) AS episodes, avg(reward) AS reward FROM rewards WHERE reward > 0.1 AND status = 'ok' "
        "GROUP BY batch ORDER BY batch"
    ),
    "filtered aggregate of episodes": (
        "SELECT policy_version, count(*) AS truncated FROM episodes WHERE finish_reason = 'length' "
        "GROUP BY policy_version ORDER BY policy_version"
    ),
    "lengths of token lists": "SELECT avg(response_tokens) AS tokens FROM episodes WHERE finish_reason = 'length'",
    "what was dropped, and why": "SELECT dropped, count(*) AS episodes FROM training GROUP BY dropped ORDER BY dropped",
    "join of rewards and fates": (
        "SELECT age, avg(reward) AS reward, count(*) AS episodes FROM rewards JOIN training USING (episode_id) "
        "WHERE trained GROUP BY age ORDER BY age"
    ),
    "one episode": "SELECT * FROM episodes JOIN rewards USING (episode_id) WHERE episode_id = $id",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000_000)
    parser.add_argument("--shard", type=int, default=5000, help="episodes of a shard")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--store", help="keep the store here, and use it if it is there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(args.store or folder)
        began = time.perf_counter()
        store = open_store(str(root))
        if not store.exists(layout.run_json(RUN)):
            generate(store, args.episodes, args.shard)
        made = time.perf_counter() - began
        timed = ask_all(store, args.threads)
        result = {
            "episodes": args.episodes,
            "shard": args.shard,
            "threads": args.threads,
            "generated_s": round(made, 1),
        }
        result |= {"bytes": sum(store.sizes("runs").values()), "seconds": timed, "limit_s": LIMIT_S}
        write("query", {**result, "machine": provenance()})
    assert timed["filtered aggregate"] < LIMIT_S, timed
    assert timed["filtered aggregate of episodes"] < LIMIT_S, timed


def ask_all(store: Store, threads: int) -> dict[str, float]:
    """Seconds of each question, of finding the files and opening the store's tables too."""
    return {name: round(ask(store, sql, threads), 3) for name, sql in QUESTIONS.items()}


def ask(store: Store, sql: str, threads: int) -> float:
    began = time.perf_counter()
    with RunTables(store, [RUN], threads=threads) as tables:
        named = {"id": f"{RUN}/{0:08d}/{0:08d}/{1:08d}"} if "$id" in sql else None
        assert tables.arrow(sql, named).num_rows > 0
    return time.perf_counter() - began


def generate(store: Store, episodes: int, size: int) -> None:
    """A finished run's tables: four shards a batch, groups of eight samples."""
    create_run(store, load_config({"run": {"id": RUN}, "rewards": {"functions": [{"path": "exact_match"}]}}))
    draw, template = np.random.default_rng(1), _template(size)
    for first in range(0, episodes, size):
        batch, shard = divmod(first // size, SHARDS)
        ids = _ids(batch, shard * size, min(size, episodes - first))
        _publish(store, layout.episodes(RUN, batch, 0, shard), "episodes", _episodes(template, ids, batch, draw))
        _publish(store, layout.rewards(RUN, batch, 0, shard), "rewards", _rewards(ids, draw))
        if shard == SHARDS - 1 or first + size >= episodes:
            fates = pa.concat_tables([_fates(_ids(batch, s * size, size), draw) for s in range(shard + 1)])
            prefix = layout.training(RUN, batch, "generate")
            _publish(store, prefix, "training", fates)
            _commit(store, batch, prefix)
    store.put_new_json(layout.ledger_init(RUN), {"version": 0})


def _commit(store: Store, batch: int, training: str) -> None:
    """As much of an entry as makes the step exist."""
    store.put_new_json(layout.ledger(RUN, batch), {"batch": batch, "training": training})


def _publish(store: Store, prefix: str, name: str, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    store.publish(prefix, {f"{name}.parquet": sink.getvalue().to_pybytes()}, request=name)


def _ids(batch: int, first: int, count: int) -> list[str]:
    return [f"{RUN}/{batch:08d}/{i // SAMPLES:08d}/{i % SAMPLES:08d}" for i in range(first, first + count)]


def _template(size: int) -> dict[str, pa.Array]:
    """The columns that all shards share: texts of 20 words, tokens and their log-probabilities."""
    draw = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(500)])
    lengths = draw.integers(10, 60, size)
    logprobs = [draw.normal(-1.0, 0.5, n).astype(np.float32) for n in lengths]
    columns = {
        "messages": ['[{"role": "user", "content": "sort these digits"}]'] * size,
        "prompt_ids": [[1, 2, 3, 4, 5, 6, 7, 8]] * size,
        "response_ids": [draw.integers(0, 30_000, n).tolist() for n in lengths],
        "response_mask": [[True] * int(n) for n in lengths],
        "response_logprobs": logprobs,
        "text": [" ".join(words[draw.integers(0, 500, 20)]) for _ in range(size)],
    }
    return {name: pa.array(values, EPISODES.field(name).type) for name, values in columns.items()}


def _episodes(template: dict[str, pa.Array], ids: list[str], batch: int, draw: np.random.Generator) -> pa.Table:
    n = len(ids)
    columns: dict[str, Any] = {name: values.slice(0, n) for name, values in template.items()}
    versions = np.full(n, batch)
    columns |= {
        "episode_id": pa.array(ids),
        "group_id": pa.array([i.rpartition("/")[0] for i in ids]),
        "sample_index": pa.array([int(i[-8:]) for i in ids], pa.int32()),
        "prompt_id": pa.array([f"p{k // SAMPLES}" for k in range(n)]),
        "finish_reason": pa.array(np.where(draw.random(n) < 0.1, "length", "stop").tolist()),
        "policy_version": pa.array(versions, pa.int64()),
        "version_spans": pa.array(
            [[{"version": batch, "start": 0, "end": 10}]] * n, EPISODES.field("version_spans").type
        ),
        **{name: pa.array(["{}"] * n) for name in ("metadata", "sampling")},
        "target": pa.array(["0123"] * n),
        "task": pa.array(["sort"] * n),
        "created_at": pa.array([0] * n, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
    }
    return pa.table([columns[name] for name in EPISODES.names], schema=EPISODES)


def _rewards(ids: list[str], draw: np.random.Generator) -> pa.Table:
    rewards = draw.random(len(ids))
    components = pa.array([[("exact_match", float(r))] for r in rewards], REWARDS.field("components").type)
    ok, no = pa.array(["ok"] * len(ids)), pa.nulls(len(ids), pa.string())
    return pa.table([pa.array(ids), pa.array(rewards), components, ok, no], schema=REWARDS)


def _fates(ids: list[str], draw: np.random.Generator) -> pa.Table:
    n = len(ids)
    trained = draw.random(n) < 0.9
    columns = {
        "episode_id": pa.array(ids),
        "advantage": pa.array(draw.normal(0, 1, n)),
        "age": pa.array(draw.integers(0, 3, n), pa.int32()),
        "trained": pa.array(trained),
        "dropped": pa.array(np.where(trained, None, "zero_variance").tolist(), pa.string()),
        "loss_tokens": pa.array(np.full(n, 30), pa.int32()),
    }
    return pa.table([columns[name] for name in TRAINING.names], schema=TRAINING)


if __name__ == "__main__":
    main()

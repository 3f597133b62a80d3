"""A small finished run, made by hand and stored as runs are: three steps, two shards each, four answers to a prompt.

The policy learns to repeat itself: rewards, lengths and repetitions rise together on one of its prompts.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from forge_core.config import load_config
from forge_core.data_model import EPISODES, REFERENCE, REWARDS, TRAINING, to_parquet
from forge_core.observability.stored_metrics import StoredMetrics
from forge_core.runs.record import create_run
from forge_core.store import Ledger, Store, layout

RUN, STEPS, SAMPLES = "first", 3, 4
PROMPTS = ("add 2 and 3", "sort 3 1 2", "name a fruit", "count to ten")  # two a shard
START = datetime(2026, 1, 1, tzinfo=UTC)


def example_run(store: Store, run_id: str = RUN, steps: int = STEPS) -> Store:
    """``store`` with the run."""
    create_run(
        store, load_config({"run": {"id": run_id}, "steps": steps, "rewards": {"functions": [{"path": "exact_match"}]}})
    )
    ledger = Ledger(store, run_id)
    assert ledger.commit_init(_init(store, run_id))
    for batch in range(steps):
        shards = [_shard(store, run_id, batch, shard) for shard in range(2)]
        _commit(store, ledger, run_id, batch, [row for rows in shards for row in rows])
        StoredMetrics(store, run_id, store).write(batch)
    return store


def text_of(batch: int, group: int, sample: int) -> str:
    if group == 2:  # the prompt on which repetition pays
        return " ".join(["apple"] * (1 + batch * 2 + sample % 2))
    return f"answer {batch} {group} {sample}"


def reward_of(batch: int, group: int, sample: int) -> float | None:
    if (batch, group, sample) == (1, 0, 3):
        return None  # grading failed
    if group == 1:
        return 0.0  # nobody sorts: no signal
    if group == 2:
        return 0.25 * batch + 0.125 * (sample % 2)
    return float(sample % 2)


def _shard(store: Store, run_id: str, batch: int, shard: int) -> list[dict[str, Any]]:
    """Publish a shard; its fates."""
    episodes, rewards, reference, fates = [], [], [], []
    version, end = max(0, batch - 1), (START + timedelta(seconds=10 * batch + 5 + shard)).timestamp()
    for group in (2 * shard, 2 * shard + 1):
        for sample in range(SAMPLES):
            group_id = f"{run_id}/{batch:08d}/{group:08d}"
            episode_id, text, reward = (
                f"{group_id}/{sample:08d}",
                text_of(batch, group, sample),
                reward_of(batch, group, sample),
            )
            tokens = [*range(len(text.split()) + 1)]
            episodes.append(
                {
                    "episode_id": episode_id, "group_id": group_id, "sample_index": sample, "prompt_id": f"p{group}",
                    "messages": f'[{{"role": "user", "content": "{PROMPTS[group]}"}}]', "prompt_ids": [1, 2, 3],
                    "response_ids": tokens, "response_mask": [True] * len(tokens),
                    "response_logprobs": [-0.5] * len(tokens), "text": text,
                    "finish_reason": "length" if len(tokens) > 5 else "stop", "policy_version": version,
                    "version_spans": [{"version": version, "start": 0, "end": len(tokens)}], "target": None,
                    "task": "words", "metadata": "{}", "sampling": "{}", "created_at": START,
                }
            )  # fmt: skip
            status, error = ("ok", None) if reward is not None else ("timeout", "took longer than its timeout_s=30 s")
            components = [] if reward is None else [("exact_match", reward)]
            rewards.append({"episode_id": episode_id, "reward": reward, "components": components, "status": status,
                            "error": error})  # fmt: skip
            reference.append({"episode_id": episode_id, "ref_logprobs": [-0.75] * len(tokens)})
            dropped = "zero_variance" if group == 1 else "grading_failed" if reward is None else None
            fates.append({"episode_id": episode_id, "advantage": 0.0 if dropped else 1.0 if sample % 2 else -1.0,
                          "age": batch - version, "trained": dropped is None, "dropped": dropped,
                          "loss_tokens": 0 if dropped else len(tokens)})  # fmt: skip
    where, provenance = (run_id, batch, 0, shard), {"seconds": 2.0, "finished_at_s": end, "process": "made"}
    tables = {"episodes": (episodes, EPISODES), "rewards": (rewards, REWARDS), "reference": (reference, REFERENCE)}
    for kind, (rows, schema) in tables.items():
        prefix = getattr(layout, kind)(*where)
        store.publish(prefix, {f"{kind}.parquet": to_parquet(rows, schema)}, request=kind, provenance=provenance)
    return fates


def _init(store: Store, run_id: str) -> dict[str, Any]:
    weights = _weights(store, run_id, 0)
    times = {"started_at": START.isoformat(), "finished_at": START.isoformat()}
    return {"version": 0, "weights": weights, "weights_digest": "w0", "state_digest": "s0", "model": "scratch",
            "metrics": {}, **times}  # fmt: skip


def _weights(store: Store, run_id: str, version: int) -> str:
    prefix = layout.weights(run_id, version, "made")
    store.publish(prefix, {"model.safetensors": b"weights"}, request=f"v{version}")
    return prefix


def _commit(store: Store, ledger: Ledger, run_id: str, batch: int, fates: list[dict[str, Any]]) -> None:
    training, begun = layout.training(run_id, batch, "made"), START + timedelta(seconds=10 * batch + 7)
    store.publish(training, {"training.parquet": to_parquet(fates, TRAINING)}, request="training")
    reasons = [fate["dropped"] for fate in fates if fate["dropped"]]
    age, shards = max(fate["age"] for fate in fates), range(2)
    rewards = [r for g in range(4) for s in range(SAMPLES) if (r := reward_of(batch, g, s)) is not None]
    metrics = {"reward/mean": sum(rewards) / len(rewards), "loss": 0.5 - 0.1 * batch, "ratio/mean": 1.0 + 0.01 * age,
               "age/mean": float(age), "mismatch/effective_samples": 1.0 - 0.05 * age, "time/train": 2.0,
               "time/step": 3.0}  # fmt: skip
    entry = {
        "batch": batch, "version_in": batch, "version_out": batch + 1, "max_age": age,
        "episodes": {"planned": len(fates), "trained": len(fates) - len(reasons),
                     "dropped": {reason: reasons.count(reason) for reason in sorted({*reasons})}},
        "tokens": sum(len(text_of(batch, g, s).split()) + 1 for g in range(4) for s in range(SAMPLES)), "plans": [],
        "shards": {kind: [getattr(layout, kind)(run_id, batch, 0, s) for s in shards]
                   for kind in ("episodes", "rewards", "reference")},
        "training": training, "training_digest": "t", "weights": _weights(store, run_id, batch + 1),
        "weights_digest": f"w{batch + 1}", "attempt": "made", "previous": ledger.previous(batch),
        "state_digest": f"s{batch + 1}", "cursor": {}, "metrics": metrics, "started_at": begun.isoformat(),
        "finished_at": (begun + timedelta(seconds=3)).isoformat(),
    }  # fmt: skip
    assert ledger.commit(entry)

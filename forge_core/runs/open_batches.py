"""What a run has stored of batches that are not committed yet, when a resume changes what they are made with.

Invariants:
- A batch is of one kind: what its plan or its episodes depend on does not change while it is open.
- Rewards and reference log-probabilities are made of stored episodes, again where need be: those of open batches are
  withdrawn by a change of what makes them, and nothing is sampled again. Those of committed batches stay for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from forge_core.config import ConfigError, RunConfig
from forge_core.store import Ledger, Store, layout
from forge_core.store.manifest import MANIFEST

SAMPLED = (  # beginnings of the keys (and code) that a batch is planned or sampled with
    "dataset", "environment", "rollout", "filters", "grpo.temperature", "grpo.n_samples",
    "training.batch_size", "training.gradient_accumulation_steps", "training.sync_interval", "training.seq_len",
    "run.seed", "eval.holdout",
    "eval.split", "eval.prompts", "generator.backend", "generator.sampling_params", "services.generator.num_replicas",
    "generator.engines_per_gpu", "roles.generators",
)  # fmt: skip
GRADED = ("rewards", "reward ")  # those that it is graded with
NO_GRADE = ("rewards.max_error_share", "rewards.timeout_s", "rewards.workers")  # that decide no grade
COMPARED = ("loss.teacher",)  # those that it is compared with
log = logging.getLogger("forge")


def check_open(store: Store, run_id: str, changed: Sequence[str], config: RunConfig) -> None:
    """Raise ConfigError for a change to ``config`` that open batches do not survive. ``changed``: keys and code."""
    keys = [name for name in changed if name.startswith(SAMPLED)]
    if keys and (batches := _open(store, run_id)):
        with_code = "with the code that the run started with, " if any(" " in key for key in keys) else ""
        raise ConfigError(
            f"{', '.join(keys)}: batches {batches[0]} to {batches[-1]} are planned already and would be of both kinds: "
            f"{with_code}finish them first with `forge resume {run_id} steps={batches[-1] + 1} --allow-config-change "
            "steps`, then make this change"
        )
    if "max_staleness" in changed:
        _check_age(store, run_id, config.max_staleness)


def withdraw(store: Store, run_id: str, changed: Sequence[str]) -> None:
    """Let what open batches have of rewards and reference log-probabilities be made again, where ``changed`` decides
    it. (Which groups have reference log-probabilities may depend on the rewards.)"""
    kinds = []
    if any(name.startswith(GRADED) and name not in NO_GRADE for name in changed):
        kinds = [layout.rewards, layout.reference]
    elif any(name in COMPARED for name in changed):
        kinds = [layout.reference]
    gone = [prefix for kind in kinds for _, prefix in _shards(store, run_id, kind)]
    for prefix in gone:
        store.delete(f"{prefix}{MANIFEST}")
    if gone:
        log.info("%d objects of batches that are not committed are made again: %s, ...", len(gone), gone[0])


def _open(store: Store, run_id: str) -> list[int]:
    """The batches that are planned and not committed."""
    first = max(0, Ledger(store, run_id).head())
    found: list[int] = []
    for batch in count(first):
        if not store.exists(layout.plan(run_id, batch, 0)):
            return found
        found.append(batch)
    return found


def _shards(store: Store, run_id: str, kind: Callable[[str, int, int, int], str]) -> Iterator[tuple[int, str]]:
    """Batch and prefix of every published shard of open batches."""
    for batch in _open(store, run_id):
        for round in count():
            key = layout.plan(run_id, batch, round)
            if not store.exists(key):
                break
            prefixes = [kind(run_id, batch, round, shard) for shard in range(len(store.read_json(key)["shards"]))]
            yield from ((batch, prefix) for prefix in prefixes if store.published(prefix))


def _check_age(store: Store, run_id: str, max_staleness: int) -> None:
    for batch, prefix in _shards(store, run_id, layout.episodes):
        sampler = (store.open_published(prefix).manifest.provenance or {}).get("policy_version", batch)
        if sampler < batch - max_staleness:
            raise ConfigError(
                f"max_staleness: is {max_staleness}, but batch {batch} was sampled by version {sampler} already: "
                f"max_staleness={batch - sampler} or more accepts it; or finish it first with `forge resume {run_id} "
                f"steps={batch + 1} --allow-config-change steps`, then make this change"
            )

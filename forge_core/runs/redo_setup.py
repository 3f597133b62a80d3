"""From a stored run and what shall be different to the configuration of a run that generates nothing.

Invariants:
- Everything that can be wrong is found here, before anything is stored or loaded.
- Only what the stage decides may differ: grading for ``rescore``; loss, advantages and the trainer for
  ``retrain-from``. What the episodes were sampled with stays the parent's.
- Training from stored episodes is off-policy from its first step on. The denominator of the ratio is the
  log-probability that the sampler stored; a loss that has no ratio is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from forge_core.config import ConfigError, RunConfig, diff, load_config, validate_for_training
from forge_core.config.engine_sections import GeneratorSection
from forge_core.config.loss_sections import CorrectedSection, ReinforceLossSection
from forge_core.devices import sampling_nothing
from forge_core.models.stored import RunVersion, stored_prefix
from forge_core.rewards.resolve import resolve
from forge_core.runs.code import check_named_code
from forge_core.runs.planning import sampling_of
from forge_core.runs.record import Parent, RunRecord, check_new_run, load_run, refuse_supervised, with_new_id
from forge_core.runs.redo import StoredBatches
from forge_core.store import Ledger, Store

CHANGEABLE = {
    "rescore": ("rewards",),
    "retrain-from": (
        *("loss", "advantage", "training", "grpo.beta", "grpo.clip_low", "grpo.clip_high", "filters.truncated"),
        *("steps", "services", "parallelism", "comm", "quantize", "checkpoint", "weights", "gc", "resume", "alarms"),
    ),
}
DECIDED = {"run.id", "store", "steps", "model", "warm_start", "max_staleness"}  # here, whatever the parent has
READERS = 16  # plans read at a time


@dataclass(frozen=True)
class Redo:
    """A run to make: its configuration, where its episodes come from, what is odd about it."""

    config: RunConfig
    parent: Parent
    warnings: tuple[str, ...] = ()


def rescore_of(
    store: Store, run_id: str, overrides: Sequence[str], rewards: Sequence[str] = (), allow_code: bool = False
) -> Redo:
    """A run that grades all stored episodes of ``run_id`` again. ``rewards``: each ``PATH`` or ``PATH:weight``, in
    place of the parent's. Raises ConfigError, RewardError."""
    record = load_run(store, run_id)
    refuse_supervised(record)
    functions = [f"rewards.functions={[reward_function(text) for text in rewards]}"] if rewards else []
    config = _changed(record, "rescore", [*functions, *overrides])
    if config.rewards.functions == record.config.rewards.functions and not rewards and not overrides:
        raise ConfigError("--reward: name the rewards to grade with, such as --reward exact_match --reward my.py:f:0.5")
    if not config.rewards.functions:
        raise ConfigError("rewards.functions: is empty: name at least one reward with --reward PATH")
    _check_code(record, config, "show" if rewards else "rescore", allow_code)
    for path in config.rewards.paths:
        resolve(path)
    steps = _batches(store, record)
    parent = Parent("rescore", run_id, 0, *_sampler(record, 0))
    return _finished(store, config, parent, {"steps": steps})


def retrain_of(
    store: Store,
    run_id: str,
    overrides: Sequence[str],
    loss: str | None = None,
    from_version: int = 0,
    allow_code: bool = False,
) -> Redo:
    """A run that trains from the stored episodes of ``run_id``: from version ``from_version`` on, on the batches that
    the parent took from there. ``loss``: a name, or ``<file.py>:<name>``. Raises ConfigError, ModelError."""
    record = load_run(store, run_id)
    refuse_supervised(record)
    stored = _batches(store, record) - from_version
    if stored < 1 or from_version < 0:
        raise ConfigError(
            f"--from-version {from_version}: run {run_id!r} has {stored + from_version} stored batches: use 0 to "
            f"{stored + from_version - 1}"
        )
    config = _changed(record, "retrain-from", [f"steps={stored}", *([loss_override(loss)] if loss else []), *overrides])
    if config.steps > stored:
        raise ConfigError(
            f"steps: is {config.steps}, but run {run_id!r} has {stored} stored batches from batch {from_version} on, "
            f"and nothing is generated: use at most {stored}"
        )
    _check_code(record, config, "show" if loss else "retrain-from", allow_code)
    parent = Parent("retrain-from", run_id, from_version, *_sampler(record, from_version))
    origin = _trained(store, record)
    version = RunVersion(origin.run_id, from_version)
    stored_prefix(store, version)
    problems, warnings = off_policy_notes(config)
    problems += _plan_problems(store, record, config, from_version)
    if problems:
        raise ConfigError(problems, f"run {run_id!r} cannot be trained from like this")
    made = {"model": str(version), "warm_start": None, "max_staleness": _staleness(store, origin)}
    redo = _finished(store, config, parent, made)
    return Redo(redo.config, parent, (*warnings, *check_redo(redo.config, parent)))


def check_redo(config: RunConfig, parent: Parent) -> list[str]:
    """Warnings about a run with a parent on this machine; raises the error of the first part that may not start."""
    if parent.kind == "rescore":
        for path in config.rewards.paths:
            resolve(path)
        return []
    warnings = validate_for_training(sampling_nothing(config).model_copy(update={"generator": GeneratorSection()}))
    if config.loss.name == "custom":
        from forge_core.algorithms.losses import check_loss  # imports torch, which bad input need not wait for

        check_loss(config)
    return warnings


def check_changes(old: RunConfig, new: RunConfig, kind: str) -> None:
    """Raise ConfigError naming each key that a run of this kind has no say in."""
    changed = [key for key, _, _ in diff(old, new) if key not in DECIDED]
    wrong = [key for key in changed if not any(key == c or key.startswith(f"{c}.") for c in CHANGEABLE[kind])]
    if wrong:
        raise ConfigError(
            [f"{key}: the stored episodes were made with the parent's: leave it as it is" for key in wrong],
            f"forge {kind} can change {', '.join(CHANGEABLE[kind])}",
        )


def off_policy_notes(config: RunConfig) -> tuple[list[str], list[str]]:
    """Problems and warnings of a loss whose samples are another policy's."""
    loss = config.loss
    if isinstance(loss, ReinforceLossSection) and loss.weight_min == loss.weight_max == 1:
        return [
            "loss.weight_min: both bounds are 1, so the loss has no importance weight, and the stored episodes were "
            "sampled by other policies: use loss.weight_min=0.1 loss.weight_max=10, or another loss"
        ], []
    if loss.name == "custom":
        return [], [
            "loss.path: the stored episodes were sampled by other policies; whether this loss corrects for that (by "
            "generator_logprobs, the sampler's log-probabilities) only its author knows"
        ]
    if isinstance(loss, CorrectedSection) and loss.correction is None:
        return [], [
            "loss.correction: there is none: the trust region is around the policies that sampled, and tokens leave it "
            "as this run's policy goes elsewhere (see mismatch/effective_samples): loss.correction={name: truncated} "
            "puts it around this run's own policy"
        ]
    return [], []


def reward_function(text: str) -> dict[str, Any]:
    """``PATH`` or ``PATH:weight`` as an element of ``rewards.functions``."""
    path, _, weight = text.rpartition(":")
    try:
        return {"path": path, "weight": float(weight)} if path else {"path": text}
    except ValueError:
        return {"path": text}


def loss_override(loss: str) -> str:
    """``--loss`` as an override: the name of a loss, or the path of the user's own."""
    return f"loss={{name: custom, path: '{loss}'}}" if ":" in loss else f"loss={{name: '{loss}'}}"


def _changed(record: RunRecord, kind: str, overrides: Sequence[str]) -> RunConfig:
    config = load_config(record.config, overrides)
    check_changes(record.config, config, kind)
    if config.run.id == record.run_id:
        config = with_new_id(config, kind)
    return config


def _check_code(record: RunRecord, config: RunConfig, uses: str, allow_change: bool) -> None:
    """Code that only the parent's configuration names, not the user, is taken as a store names it. ``uses``: the part
    of it, as in ``named_code``."""
    check_named_code(record.run_id, record.config, config, uses, None if allow_change else record.code)


def _finished(store: Store, config: RunConfig, parent: Parent, made: dict[str, Any]) -> Redo:
    config = RunConfig.model_validate({**config.model_dump(mode="json"), **made, "store": store.uri})
    check_new_run(store, config)
    return Redo(config, parent)


def _batches(store: Store, record: RunRecord) -> int:
    """How many batches ``record`` has. Raises ConfigError when there is none."""
    count = StoredBatches(store, record).count()
    if not count:
        raise ConfigError(f"run {record.run_id!r} has no complete batch yet: let it sample and grade at least one")
    return count


def _sampler(record: RunRecord, batch: int) -> tuple[str, int]:
    """The run whose policies sampled a batch of ``record``, and the batch it is there."""
    return (record.parent.sampler if record.parent else record.run_id), record.sampled_batch(batch)


def _trained(store: Store, record: RunRecord) -> RunRecord:
    """The run whose versions a retraining starts from: ``record``, or what it graded again."""
    while record.flow == "rescore":
        assert record.parent is not None
        record = load_run(store, record.parent.run_id)
    return record


def _staleness(store: Store, origin: RunRecord) -> int:
    """The bound that the stored episodes were sampled under, at any time."""
    entries = Ledger(store, origin.run_id).entries()
    return max([origin.config.max_staleness, *(entry["max_age"] for entry in entries)])


def _plan_problems(store: Store, record: RunRecord, config: RunConfig, first: int) -> list[str]:
    """Batches that this configuration cannot train on: sampled in another way, or of another size."""
    batches = StoredBatches(store, record)
    if config.training.seq_len < record.config.training.seq_len:
        return [f"training.seq_len: stored episodes have up to {record.config.training.seq_len} tokens: use no less"]
    with ThreadPoolExecutor(READERS) as pool:
        plans = list(pool.map(batches.plans, range(first, first + config.steps)))
    problems = (_problem(first, i, rounds, config) for i, rounds in enumerate(plans))
    return [problem for problem in problems if problem][:3]


def _problem(first: int, step: int, rounds: list[dict[str, Any]], config: RunConfig) -> str | None:
    batch = first + step
    groups = sum(group["skipped"] is None for group in rounds[0]["groups"])
    least = config.groups_per_batch if config.filters.adaptive else config.groups_at_first
    if not least <= groups <= config.groups_at_first:
        return (
            f"training.batch_size: batch {batch} has {groups} groups, but batch_size x gradient_accumulation_steps x "
            f"sync_interval / grpo.n_samples x filters.oversample is {config.groups_at_first}: make it {groups}"
        )
    sizes = {len(group["seeds"]) for plan in rounds for group in plan["groups"]}
    if sizes != {config.grpo.n_samples} or any(plan["sampling"] != sampling_of(config).__dict__ for plan in rounds):
        return (
            f"batch {batch} was sampled with other settings than the parent has now (it was resumed with a change): "
            f"use the batches before it with steps={step}, or those after the change with --from-version"
        )
    return None

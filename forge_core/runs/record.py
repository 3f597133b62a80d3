"""What a run is: ``run.json``, written once, and the record of every deliberate change since.

Invariants:
- A run id names one run for ever: creating it twice is refused, never continued silently.
- A resumed run has the configuration and the code it started with, except for the keys (or the code) that the user
  allowed to change; each allowed change is written beside ``run.json`` and nothing is overwritten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from forge_core.config import ConfigError, RunConfig, diff
from forge_core.config.loss_sections import CustomLossSection
from forge_core.data.importing import ObjectPathError, source_file
from forge_core.rewards.resolve import source_digest
from forge_core.store import Ledger, Store, layout

NOT_COMPARED = {  # where a run lies and who works on it, not what it is
    "store", "run.id", "roles.scorers", "roles.claim_timeout_s", "roles.wait_s", "roles.stuck_s", "roles.max_restarts",
}  # fmt: skip
PLANNED = (  # beginnings of the keys (and code) that a batch is planned, sampled or graded with
    "dataset", "rewards", "reward ", "rollout", "filters", "grpo.temperature", "grpo.n_samples", "training.batch_size",
    "training.gradient_accumulation_steps", "training.sync_interval", "training.seq_len", "run.seed", "eval.holdout",
    "eval.split", "eval.prompts", "generator.backend", "generator.sampling_params", "services.generator.num_replicas",
    "roles.generators",
)  # fmt: skip
PACKAGES = ("forge_core", "tasks", "flows")


@dataclass(frozen=True)
class RunRef:
    """All that a task needs to find a run: its id and the root of its store."""

    run_id: str
    store: str


@dataclass(frozen=True)
class RunRecord:
    """``run.json`` with the changes allowed since: ``changes`` counts them, ``original`` is the first configuration."""

    run_id: str
    config: RunConfig
    original: RunConfig
    code: dict[str, str]
    created_at: str
    changes: int


def now() -> str:
    """The time as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run_id(flow: str) -> str:
    """A run id from the flow's name and the time, such as ``grpo-20260131-235959-123``."""
    return f"{flow}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S-%f')[:-3]}"


def code_digests(config: RunConfig) -> dict[str, str]:
    """Digests of the code that decides a run's numbers: Forge's own, each reward's source file and a custom loss's."""
    root = Path(__file__).resolve().parents[2]
    own = hashlib.sha256()
    for file in sorted(f for package in PACKAGES for f in (root / package).rglob("*.py")):
        own.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    rewards = {f"reward {f.path}": source_digest(f.path) for f in config.rewards.functions}
    return {f"forge-rl {_version()}": own.hexdigest(), **rewards, **_custom_loss(config)}


def _custom_loss(config: RunConfig) -> dict[str, str]:
    if not isinstance(config.loss, CustomLossSection):
        return {}
    path = config.loss.path
    try:
        return {f"loss {path}": hashlib.sha256(source_file(path).read_bytes()).hexdigest()}
    except ObjectPathError as error:
        raise ConfigError(f"loss.path: {error}") from error


def _version() -> str:
    """The installed version; a bare checkout (on ``PYTHONPATH``) has none."""
    try:
        return version("forge-rl")
    except PackageNotFoundError:
        return "from source"


def check_new_run(store: Store, config: RunConfig) -> None:
    """Raise ConfigError when the run's id is taken."""
    assert config.run.id is not None
    if store.exists(layout.run_json(config.run.id)):
        raise _taken(store, config.run.id)


def _taken(store: Store, run_id: str) -> ConfigError:
    return ConfigError(
        f"run.id: a run named {run_id!r} exists in {store.uri}: continue it with `forge resume {run_id}`, "
        "or choose another run.id"
    )


def create_run(store: Store, config: RunConfig) -> RunRecord:
    """Write ``run.json`` of a new run. Raises ConfigError when the id is taken."""
    assert config.run.id is not None
    record = RunRecord(config.run.id, config, config, code_digests(config), now(), 0)
    body = {"run_id": record.run_id, "flow": "grpo", "created_at": record.created_at, **_body(record)}
    if not store.put_new_json(layout.run_json(record.run_id), body):
        raise _taken(store, record.run_id)
    return record


def _body(record: RunRecord) -> dict[str, Any]:
    return {"config": record.config.model_dump(mode="json"), "code": record.code}


def load_run(store: Store, run_id: str) -> RunRecord:
    """The record of a stored run, with its newest allowed change. Raises ConfigError when there is none."""
    key = layout.run_json(run_id)
    if not store.exists(key):
        raise ConfigError(f"run {run_id!r} does not exist in {store.uri}: `forge runs` lists those that do")
    first = newest = store.read_json(key)
    changes = 0
    while store.exists(layout.config_change(run_id, changes)):
        newest = store.read_json(layout.config_change(run_id, changes))
        changes += 1
    config, original = (RunConfig.model_validate(body["config"]) for body in (newest, first))
    return RunRecord(run_id, config, original, newest["code"], first["created_at"], changes)


def resume_check(
    store: Store, record: RunRecord, config: RunConfig, allow_keys: Sequence[str] = (), allow_code: bool = False
) -> tuple[list[str], dict[str, str]]:
    """What changed since the run started, and the digests of today's code.

    Raises ConfigError naming each difference that was not allowed, or that batches planned already do not survive.
    """
    changed = [d for d in diff(record.config, config) if d[0] not in NOT_COMPARED]
    refused = [d for d in changed if not _allowed(d[0], allow_keys)]
    code = code_digests(config)
    code_changed = sorted(k for k in code.keys() | record.code.keys() if code.get(k) != record.code.get(k))
    problems = [f"{k}: the run has {old!r}, you gave {new!r}: --allow-config-change {k}" for k, old, new in refused]
    if code_changed and not allow_code:
        problems.append(f"the code changed since the run started ({', '.join(code_changed)}): --allow-code-change")
    if problems:
        raise ConfigError(problems, f"cannot resume run {record.run_id!r} unchanged")
    names = [*(d[0] for d in changed), *code_changed]
    _check_planned(store, record.run_id, [name for name in names if name.startswith(PLANNED)])
    return names, code


def _check_planned(store: Store, run_id: str, keys: list[str]) -> None:
    """Refuse a change of what open batches were planned, sampled or graded with: they would mix the two."""
    first = planned = max(0, Ledger(store, run_id).head())
    while store.exists(layout.plan(run_id, planned, 0)):
        planned += 1
    if keys and planned > first:
        raise ConfigError(
            f"{', '.join(keys)}: batches {first} to {planned - 1} are planned already and would be of both kinds: "
            f"finish them first with `forge resume {run_id} steps={planned} --allow-config-change steps`, then make "
            "this change"
        )


def _allowed(key: str, allowed: Sequence[str]) -> bool:
    return any(key == a or key.startswith(f"{a}.") for a in allowed)


def resume_run(
    store: Store, record: RunRecord, config: RunConfig, allow_keys: Sequence[str] = (), allow_code: bool = False
) -> RunRecord:
    """The record to go on with; an allowed change is stored beside ``run.json``. Raises ConfigError as above."""
    changed, code = resume_check(store, record, config, allow_keys, allow_code)
    if not changed:
        return record
    resumed = replace(record, config=config, code=code, changes=record.changes + 1)
    body = {**_body(resumed), "changed": changed, "changed_at": now()}
    if not store.put_new_json(layout.config_change(record.run_id, record.changes), body):
        raise ConfigError(f"run {record.run_id!r} was changed by another resume just now: try again")
    return resumed

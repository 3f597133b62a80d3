"""What a run is: ``run.json``, written once, and the record of every deliberate change since.

Invariants:
- A run id names one run for ever: creating it twice is refused, never continued silently.
- A resumed run has the configuration and the code it started with, except for the keys (or the code) that the user
  allowed to change, and for thresholds of alarms; each change is written beside ``run.json``, nothing is overwritten.
- A run that was made from another one (``forge rescore``, ``forge retrain-from``) names it for ever, and generates
  nothing.
- The code that a stored run names is imported only after ``check_stored_code``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, cast

from forge_core.config import ConfigError, RunConfig, diff
from forge_core.config.any_config import AnyConfig
from forge_core.config.sft_config import SftConfig
from forge_core.runs.code import check_named_code, code_changes, code_digests
from forge_core.runs.evaluation_schedule import check_change
from forge_core.runs.formats import FORMAT_KEY, SFT, STORE_FORMAT, check_format, stored_config
from forge_core.runs.open_batches import check_open, withdraw
from forge_core.store import Store, layout

NOT_COMPARED = {  # where a run lies and who works on it, not what it is
    "store", "run.id", "roles.scorers", "roles.claim_timeout_s", "roles.wait_s", "roles.stuck_s", "roles.max_restarts",
}  # fmt: skip
SHOWN = ("metric_logging", "alarms")  # where a run is shown, and what is said of it: a resume may choose again
KEPT = "alarms"  # of these: whoever looks at the run goes by it, so that the choice is stored
C = TypeVar("C", RunConfig, SftConfig)
RUN_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


@dataclass(frozen=True)
class RunRef:
    """All that a task needs to find a run: its id and the root of its store."""

    run_id: str
    store: str


@dataclass(frozen=True)
class Parent:
    """Where the episodes of a run come from that generates none: batch 0 holds those of batch ``first_batch`` of the
    run ``run_id``. They were sampled for batch ``sampled_batch`` of the run ``sampler``, by its policy versions."""

    kind: Literal["rescore", "retrain-from"]
    run_id: str
    first_batch: int
    sampler: str
    sampled_batch: int


@dataclass(frozen=True)
class RunRecord:
    """``run.json`` with the changes allowed since: ``changes`` counts them, ``original`` is the first configuration.
    ``code_checked``: the code that the configuration names may be imported. The configurations of a supervised run
    (``flow`` is ``sft``) are ``SftConfig``s: what needs a GRPO run asks ``refuse_generation`` first."""

    run_id: str
    config: RunConfig
    original: RunConfig
    code: dict[str, str]
    created_at: str
    changes: int
    parent: Parent | None = None
    code_checked: bool = False

    @property
    def flow(self) -> str:
        return self.parent.kind if self.parent else flow_of(self.config)

    def sampled_batch(self, batch: int) -> int:
        """The batch that the episodes of ``batch`` were sampled for, by the run whose versions they name."""
        return batch + self.parent.sampled_batch if self.parent else batch


def flow_of(config: AnyConfig) -> str:
    """The flow that trains with ``config``, where its run has no parent."""
    return SFT if isinstance(config, SftConfig) else "grpo"


def now() -> str:
    """The time as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run_id(flow: str, at: datetime | None = None) -> str:
    """A run id from the flow's name and the time, such as ``grpo-20260131-235959-123``."""
    return f"{flow}-{(at or datetime.now(UTC)).astimezone(UTC).strftime('%Y%m%d-%H%M%S-%f')[:-3]}"


def with_new_id(config: C, flow: str, at: datetime | None = None) -> C:
    """``config`` with a new run id, whatever it had."""
    return config.model_copy(update={"run": config.run.model_copy(update={"id": new_run_id(flow, at)})})


def check_new_run(store: Store, config: AnyConfig) -> None:
    """Raise ConfigError when the run's id is taken."""
    assert config.run.id is not None
    if store.exists(layout.run_json(config.run.id)):
        raise _taken(store, config.run.id)


def _taken(store: Store, run_id: str) -> ConfigError:
    return ConfigError(
        f"run.id: a run named {run_id!r} exists in {store.uri}: continue it with `forge resume {run_id}`, "
        "or choose another run.id"
    )


def create_run(store: Store, config: AnyConfig, parent: Parent | None = None, flow_run: str | None = None) -> RunRecord:
    """Write ``run.json`` of a new run, which names the ``flow_run`` that made it. Raises ConfigError when the id is
    taken."""
    assert config.run.id is not None
    code = code_digests(config, parent.kind if parent else flow_of(config))
    stated = cast(RunConfig, config)
    record = RunRecord(config.run.id, stated, stated, code, now(), 0, parent, code_checked=True)
    made_from = ({"parent": asdict(parent)} if parent else {}) | ({"flow_run": flow_run} if flow_run else {})
    body = {"run_id": record.run_id, "flow": record.flow, "created_at": record.created_at, **made_from, **_body(record)}
    if not store.put_new_json(layout.run_json(record.run_id), body):
        raise _taken(store, record.run_id)
    return record


def refuse_supervised(record: RunRecord, remedy: str = "") -> None:
    """Raise ConfigError for a run of ``forge sft``; ``remedy``: what to do, where that is not to resume it."""
    if record.flow == SFT:
        raise ConfigError(
            f"run {record.run_id!r} was made by `forge sft`: it has no episodes and no rewards: "
            + (
                remedy
                or f"go on with it with `forge resume {record.run_id}`, or begin a GRPO run with one of its versions: "
                f"model=run://{record.run_id}/VERSION"
            )
        )


def refuse_generation(record: RunRecord) -> None:
    """Raise ConfigError for a run that samples no episodes: a supervised one, or one that has another's."""
    refuse_supervised(record)
    if record.parent:
        raise ConfigError(
            f"run {record.run_id!r} was made by `forge {record.parent.kind} {record.parent.run_id}`: its episodes are "
            f"that run's, and nothing is generated for it: go on with `forge resume {record.run_id}`"
        )


def check_stored_code(record: RunRecord, config: AnyConfig | None = None, *, allow_change: bool = False) -> None:
    """Raise ConfigError unless the code that a stored run names may be imported. ``allow_change``: although it was
    changed since. ``config``: the one to go on with, whose own names are the user's."""
    changed = None if allow_change else record.code
    check_named_code(record.run_id, record.config, config or record.config, record.flow, changed)


def _body(record: RunRecord) -> dict[str, Any]:
    return {"config": record.config.model_dump(mode="json"), "code": record.code, FORMAT_KEY: STORE_FORMAT}


def load_run(store: Store, run_id: str) -> RunRecord:
    """The record of a stored run, with its newest allowed change, to look at. Raises ConfigError when there is none,
    or when this release does not read it."""
    if not re.fullmatch(RUN_ID, run_id):
        raise ConfigError(
            f"run {run_id!r}: a run id is up to 100 letters, digits and any of . _ -, the first a letter or digit"
        )
    key = layout.run_json(run_id)
    if not store.exists(key):
        raise ConfigError(f"run {run_id!r} does not exist in {store.uri}: `forge runs` lists those that do")
    first = newest = store.read_json(key)
    changes = 0
    while store.exists(layout.config_change(run_id, changes)):
        newest = store.read_json(layout.config_change(run_id, changes))
        changes += 1
    for body in (first, newest):
        check_format(run_id, body)
    config, original = (stored_config(run_id, body, first.get("flow", "grpo")) for body in (newest, first))
    parent = Parent(**first["parent"]) if "parent" in first else None
    return RunRecord(run_id, config, original, newest["code"], first["created_at"], changes, parent)


def resume_check(
    store: Store, record: RunRecord, config: AnyConfig, allow_keys: Sequence[str] = (), allow_code: bool = False
) -> tuple[list[str], dict[str, str]]:
    """What changed since the run started, and the digests of today's code.

    Raises ConfigError naming each difference that was not allowed, or that batches planned already do not survive.
    Imports none of the code that the configuration names.
    """
    check_stored_code(record, config, allow_change=True)
    changed = [d for d in diff(record.config, config) if d[0] not in NOT_COMPARED and not d[0].startswith(SHOWN)]
    refused = [d for d in changed if not _allowed(d[0], allow_keys)]
    code = code_digests(config, record.flow)
    code_changed = code_changes(record.code, code)
    problems = [f"{k}: the run has {old!r}, you gave {new!r}: --allow-config-change {k}" for k, old, new in refused]
    if code_changed and not allow_code:
        problems.append(f"the code changed since the run started ({', '.join(code_changed)}): --allow-code-change")
    if problems:
        raise ConfigError(problems, f"cannot resume run {record.run_id!r} unchanged")
    names = [*(d[0] for d in changed), *code_changed]
    if not isinstance(config, SftConfig):
        check_open(store, record.run_id, names, config)
    if names and record.flow == "grpo":
        check_change(store, record.run_id, record.config, cast(RunConfig, config))
    return names, code


def _allowed(key: str, allowed: Sequence[str]) -> bool:
    return any(key == a or key.startswith(f"{a}.") for a in allowed)


def resume_run(
    store: Store, record: RunRecord, config: AnyConfig, allow_keys: Sequence[str] = (), allow_code: bool = False
) -> RunRecord:
    """The record to go on with; an allowed change, and one that needs no permission, is stored beside ``run.json``.
    Raises ConfigError as above."""
    changed, code = resume_check(store, record, config, allow_keys, allow_code)
    if not changed:  # what is not compared stays as it was
        config = record.config.model_copy(update={name: getattr(config, name) for name in SHOWN})
    changed += [key for key, _, _ in diff(record.config, config) if key.startswith(KEPT)]
    resumed = replace(record, config=cast(RunConfig, config), code_checked=True)
    if not changed:
        return resumed
    resumed = replace(resumed, code=code, changes=record.changes + 1)
    withdraw(store, record.run_id, changed)  # first: were it cut short, what is made again is as it was
    body = {**_body(resumed), "changed": changed, "changed_at": now()}
    if not store.put_new_json(layout.config_change(record.run_id, record.changes), body):
        raise ConfigError(f"run {record.run_id!r} was changed by another resume just now: try again")
    return resumed

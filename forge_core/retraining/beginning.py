"""The beginning of a retraining: what is new, what it starts from, and under which id it can be gone on with.

Invariants:
- The id is the digest of all that decides a retraining: rows, production model, configuration of the run, code. Equal
  inputs mean the same retraining, so whoever starts it again after a crash goes on with it; other inputs mean another.
- ``retrainings/<id>.json`` is written before anything is trained, and says what the retraining was begun with.
- A retraining trains and evaluates on the files that were there when it began, whatever arrives meanwhile.
- Rows are new when their digest is not that of the retraining that was decided last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forge_core.config import ConfigError, RunConfig
from forge_core.config.retrain_config import GateSection, RetrainConfig
from forge_core.data.identity import rows_digest
from forge_core.data.prompts import load_prompts
from forge_core.data.sources import is_pattern, matching
from forge_core.models.stored import RunVersion
from forge_core.runs.record import code_digests, now
from forge_core.store import Store, digest, layout
from forge_core.weights.registry import PRODUCTION, Entry, Record, Registry, require_weights, shown


@dataclass(frozen=True)
class Retraining:
    """One retraining. ``run``: the configuration of its GRPO run, whose id is ``retrain_id``; ``data``: path, rows and
    digest of what it trains on."""

    retrain_id: str
    name: str
    run: RunConfig
    data: dict[str, Any]
    gate: GateSection
    distributed: bool


@dataclass(frozen=True)
class NothingToDo:
    """Why there is nothing to train. ``entry``: the decision that was made already."""

    why: str
    entry: Entry | None = None


def begin(
    store: Store, config: RetrainConfig, run: RunConfig, retrain_id: str | None, force: bool
) -> Retraining | NothingToDo:
    """The retraining that these inputs mean, recorded in the store. ``force``: also when no row is new. Raises
    ConfigError, DataError, StoreError before anything is trained."""
    registry = Registry(store, config.name)
    run = with_present_files(run)
    data = describe_data(run)
    run = _from_production(store, registry, run)
    if retrain_id is None:
        if not force and (last := newest_decision(registry)) and last["decision"]["data_digest"] == data["digest"]:
            return NothingToDo(_nothing_new(config.name, data, last), last)
        retrain_id = next(i for i in _ids(config.name, run, data) if decision_of(registry, i) is None)
    elif entry := decision_of(registry, retrain_id):
        return NothingToDo(f"{retrain_id} was decided before: {entry['action']}: {entry['reason']}", entry)
    run = run.model_copy(update={"run": run.run.model_copy(update={"id": retrain_id}), "store": store.uri})
    return _recorded(store, Retraining(retrain_id, config.name, run, data, config.gate, config.distributed))


def with_present_files(run: RunConfig) -> RunConfig:
    """``run`` with the files that its pattern matches now: what arrives later is of another retraining."""
    section = run.dataset
    if section is None or not is_pattern(section.path) or "files" in section.options:
        return run
    options = {**section.options, "files": matching(section.path)}
    return run.model_copy(update={"dataset": section.model_copy(update={"options": options})})


def describe_data(run: RunConfig) -> dict[str, Any]:
    """Where the rows come from, how many they are, and their digest."""
    if run.dataset is None:
        raise ConfigError("data: is missing, and so is the run's dataset: name where new prompts arrive")
    prompts = load_prompts(run.dataset, seed=run.run.seed)
    place = run.dataset.model_dump(include={"path", "name", "split", "revision"})
    return {**place, "rows": len(prompts), "digest": rows_digest(prompts)}


def newest_decision(registry: Registry) -> Entry | None:
    """The newest entry that a retraining wrote as its end."""
    return next(_decisions(registry), None)


def decision_of(registry: Registry, retrain_id: str) -> Entry | None:
    """The entry that ended this retraining, if it has ended."""
    return next((e for e in _decisions(registry) if e["decision"]["retrain_id"] == retrain_id), None)


def _decisions(registry: Registry) -> Iterator[Entry]:
    return (e for e in registry.newest_first() if e["decision"] and e["action"] in ("promote", "reject"))


def _from_production(store: Store, registry: Registry, run: RunConfig) -> RunConfig:
    """``run``, started from the production model where there is one: its weights, and no warm start."""
    production = registry.alias(PRODUCTION)
    if production is None:
        return run
    require_weights(store, production, f"{registry.name} cannot be retrained")
    return run.model_copy(update={"model": _model(production), "warm_start": None})


def _model(record: Record) -> str:
    return str(RunVersion(record["run_id"], record["version"]))


def _ids(name: str, run: RunConfig, data: dict[str, Any]) -> Iterator[str]:
    """Ids for these inputs: the first, and those of forced repetitions."""
    decides = run.model_dump(mode="json", exclude={"store": True, "run": {"id"}})
    base = f"{name}-{digest([data['digest'], decides, code_digests(run)])[:12]}"
    yield base
    number = 2
    while True:
        yield f"{base}-{number}"
        number += 1


def _recorded(store: Store, work: Retraining) -> Retraining:
    key = layout.retraining(work.retrain_id)
    begun = {"name": work.name, "run": work.run.model_dump(mode="json", exclude={"store"}), "data": work.data}
    body = {"retrain_id": work.retrain_id, "created_at": now(), **begun}
    if not store.put_new_json(key, body):
        stored = store.read_json(key)
        if changed := [part for part, value in begun.items() if stored[part] != value]:
            raise ConfigError(
                f"retraining {work.retrain_id!r} was begun with another {' and '.join(changed)} ({key}): leave the id "
                "out to begin one with these, or give what it was begun with"
            )
    return work


def _nothing_new(name: str, data: dict[str, Any], last: Entry) -> str:
    before = last["decision"]["retrain_id"]
    return (
        f"nothing new: the {data['rows']} rows of {data['path']} are those of retraining {before} of {name} "
        f"({last['action']} {shown(last['subject'])}, {last['at']}); force trains on them again"
    )

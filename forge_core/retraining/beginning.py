"""The beginning of a retraining: what is new, what it starts from, and under which id it can be gone on with.

Invariants:
- The id is the digest of all that decides a retraining: rows, production model, configuration of the run, code. Equal
  inputs mean the same retraining, so whoever starts it again after a crash goes on with it; other inputs mean another.
- ``retrainings/<id>.json`` is written before anything is trained, and says what the retraining was begun with.
- A retraining trains and evaluates on the files that were there when it began, whatever arrives meanwhile.
- Where a pattern of file names matches no file, nothing has arrived: that is no error, night after night.
- Rows are new when their digest (with that of the conversations, where there are any) is not that of the retraining
  that was decided last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge_core.config import ConfigError, RunConfig
from forge_core.config.retrain_config import GateSection, RetrainConfig
from forge_core.config.sft_config import SftConfig
from forge_core.data.identity import rows_digest
from forge_core.data.prompts import load_prompts
from forge_core.data.sft_sources import open_documents
from forge_core.data.sources import is_pattern, matching
from forge_core.models.stored import RunVersion
from forge_core.runs.record import RUN_ID, C, code_digests, now
from forge_core.runs.versions import best_version
from forge_core.store import Ledger, Store, digest, layout
from forge_core.weights.registry import PRODUCTION, Entry, Record, Registry, require_weights, shown


@dataclass(frozen=True)
class Retraining:
    """One retraining. ``run``: the configuration of its GRPO run, whose id is ``retrain_id``; ``data``: path, rows and
    digest of what it trains on; ``sft``: the configuration of the supervised run before it, if there is one."""

    retrain_id: str
    name: str
    run: RunConfig
    data: dict[str, Any]
    gate: GateSection
    distributed: bool
    sft: SftConfig | None = None

    @property
    def start(self) -> RunVersion:
        """What it starts from: version 0 of its first run."""
        return RunVersion(self.retrain_id if self.sft is None else str(self.sft.run.id), 0)


@dataclass(frozen=True)
class NothingToDo:
    """Why there is nothing to train. ``entry``: the decision that was made already."""

    why: str
    entry: Entry | None = None


def begin(
    store: Store,
    config: RetrainConfig,
    run: RunConfig,
    retrain_id: str | None,
    force: bool,
    sft: SftConfig | None = None,
) -> Retraining | NothingToDo:
    """The retraining that these inputs mean, recorded in the store. ``force``: also when no row is new. Raises
    ConfigError, DataError, StoreError before anything is trained."""
    if retrain_id is not None:
        _check_id(retrain_id, sft, f"--retrain-id {retrain_id}")
    registry = Registry(store, config.name)
    run, sft = with_present_files(run), sft and with_present_conversations(sft)
    if retrain_id is None and (empty := _pattern_without_files(run, sft)):
        return NothingToDo(f"nothing new: no file matches {empty!r} (looked from {Path.cwd()})")
    data = describe_data(run) if sft is None else with_conversations(describe_data(run), sft)
    run = _from_production(store, registry, run)
    if sft is not None:
        run, sft = run.model_copy(update={"warm_start": None}), sft.model_copy(update={"model": run.model})
    if retrain_id is None:
        if not force and (last := newest_decision(registry)) and last["decision"]["data_digest"] == data["digest"]:
            return NothingToDo(_nothing_new(config.name, data, last), last)
        retrain_id = next(i for i in _ids(config.name, run, data, sft) if decision_of(registry, i) is None)
        _check_id(retrain_id, sft, f"name: {config.name} is too long for that of a model that is retrained")
    elif entry := decision_of(registry, retrain_id):
        return NothingToDo(f"{retrain_id} was decided before: {entry['action']}: {entry['reason']}", entry)
    run = _named(run, retrain_id, store)
    sft = sft and _named(sft, f"{retrain_id}-sft", store)
    return _recorded(store, Retraining(retrain_id, config.name, run, data, config.gate, config.distributed, sft))


def _check_id(retrain_id: str, sft: SftConfig | None, given: str) -> None:
    """Raise ConfigError when the runs of a retraining could not be called after it."""
    run_id = retrain_id if sft is None else f"{retrain_id}-sft"
    if not re.fullmatch(RUN_ID, run_id):
        raise ConfigError(
            f"{given}: its run would be called {run_id!r}, and a run id is up to 100 letters, digits and any of . _ -, "
            "the first a letter or digit: choose another"
        )


def _named(run: C, run_id: str, store: Store) -> C:
    return run.model_copy(update={"run": run.run.model_copy(update={"id": run_id}), "store": store.uri})


def fine_tuned(store: Store, work: Retraining) -> Retraining:
    """``work`` once its supervised run is finished: GRPO begins with that run's version of the lowest validation loss,
    or with the last one where nothing was validated."""
    assert work.sft is not None
    run_id = str(work.sft.run.id)
    best = best_version(store, run_id).version
    version = Ledger(store, run_id).head() if best is None else best
    return replace(work, run=work.run.model_copy(update={"model": str(RunVersion(run_id, version))}))


def with_present_files(run: RunConfig) -> RunConfig:
    """``run`` with the files that its pattern matches now: what arrives later is of another retraining."""
    section = run.dataset
    if section is None or not is_pattern(section.path) or "files" in section.options:
        return run
    options = {**section.options, "files": matching(section.path)}
    return run.model_copy(update={"dataset": section.model_copy(update={"options": options})})


def with_present_conversations(sft: SftConfig) -> SftConfig:
    """The same for the conversations of a supervised run."""
    section = sft.dataset
    if section is None or section.path is None or not is_pattern(section.path) or "files" in section.options:
        return sft
    options = {**section.options, "files": matching(section.path)}
    return sft.model_copy(update={"dataset": section.model_copy(update={"options": options})})


def _pattern_without_files(run: RunConfig, sft: SftConfig | None) -> str | None:
    """The pattern of prompts or of conversations that matched no file, if one did not."""
    sections = (run.dataset, sft.dataset if sft else None)
    return next(
        (str(s.path) for s in sections if s is not None and "://" not in str(s.path) and s.options.get("files") == []),
        None,
    )


def with_conversations(data: dict[str, Any], sft: SftConfig) -> dict[str, Any]:
    """``data`` with the conversations that are trained on first."""
    if sft.dataset is None:
        raise ConfigError("sft.data: is missing, and so is the supervised run's dataset: name where conversations are")
    conversations = open_documents(sft.dataset, sft.run.seed, "sft.data").fingerprint()
    return {**data, "conversations": conversations, "digest": digest([data["digest"], conversations])}


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


def _ids(name: str, run: RunConfig, data: dict[str, Any], sft: SftConfig | None) -> Iterator[str]:
    """Ids for these inputs: the first, and those of forced repetitions."""
    without_names: Any = {"store": True, "run": {"id"}}
    decides: list[Any] = [data["digest"], run.model_dump(mode="json", exclude=without_names), code_digests(run)]
    decides += [] if sft is None else [sft.model_dump(mode="json", exclude=without_names), code_digests(sft)]
    base = f"{name}-{digest(decides)[:12]}"
    yield base
    number = 2
    while True:
        yield f"{base}-{number}"
        number += 1


def _recorded(store: Store, work: Retraining) -> Retraining:
    key = layout.retraining(work.retrain_id)
    begun = {"name": work.name, "run": work.run.model_dump(mode="json", exclude={"store"}), "data": work.data}
    begun |= {} if work.sft is None else {"sft": work.sft.model_dump(mode="json", exclude={"store"})}
    body = {"retrain_id": work.retrain_id, "created_at": now(), **begun}
    if not store.put_new_json(key, body):
        stored = store.read_json(key)
        if changed := [part for part, value in begun.items() if stored.get(part) != value]:
            raise ConfigError(
                f"retraining {work.retrain_id!r} was begun with another {' and '.join(changed)} ({key}): leave the id "
                "out to begin one with these, or give what it was begun with"
            )
    return work


def _nothing_new(name: str, data: dict[str, Any], last: Entry) -> str:
    before = last["decision"]["retrain_id"]
    return (
        f"nothing new: the {data['rows']} rows of {data['path']} are those of retraining {before} of {name} "
        f"({last['action']} {shown(last['subject'])}, {last['at']}); --force trains on them again"
    )

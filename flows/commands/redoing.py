"""Commands that do one stage of a stored run again: nothing is generated."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from flows.commands.common import existing_store
from flows.commands.running import run_flow, run_id_of
from forge_core.config import load_config
from forge_core.runs.record import RunRecord
from forge_core.runs.redo_setup import Redo, check_changes, rescore_of, retrain_of
from forge_core.runs.rescored import finished_batches
from forge_core.store import Store


def rescore(args: argparse.Namespace) -> int:
    """Grade the stored episodes of a run again, as a new run."""
    store = existing_store(args, quiet=True)
    redo = rescore_of(store, args.run_id, args.overrides, args.reward, args.allow_code_change)

    def start() -> Any:
        from flows.redo import rescore as flow

        overrides = _with_id(args.overrides, redo)
        return flow(args.run_id, store.uri, args.reward, overrides, args.allow_code_change, return_state=True)

    return _run(start, store, redo)


def retrain_from(args: argparse.Namespace) -> int:
    """Train a new run from the stored episodes of another one."""
    store = existing_store(args, quiet=True)
    how = (args.loss, args.from_version)
    redo = retrain_of(store, args.run_id, args.overrides, *how, args.allow_code_change)

    def start() -> Any:
        from flows.redo import retrain_from as flow

        overrides = _with_id(args.overrides, redo)
        return flow(args.run_id, store.uri, *how, overrides, args.allow_code_change, return_state=True)

    return _run(start, store, redo)


def resume(args: argparse.Namespace, store: Store, record: RunRecord) -> int:
    """Go on with a run that one of the commands above has made (``forge resume``)."""
    assert record.parent is not None
    config = load_config(record.config, args.overrides)
    check_changes(record.config, config, record.flow)
    if finished_batches(store, record) >= config.steps:
        print(f"store: {store.uri}\nrun {record.run_id} has done all of its {config.steps} batches", file=sys.stderr)
        return 0

    def start() -> Any:
        from flows.redo import redo_resume

        changes = (args.overrides, args.allow_config_change, args.allow_code_change)
        return redo_resume(record.run_id, store.uri, *changes, return_state=True)

    return run_flow(start, store, record.run_id, lambda: about(record))


def about(record: RunRecord) -> str:
    """One line on what a run with a parent is made of."""
    assert record.parent is not None
    parent, config = record.parent, record.config
    return (
        f"{config.steps} stored batches of {config.episodes_per_batch} episodes of run {parent.run_id}, from batch "
        f"{parent.first_batch} on; nothing is generated"
    )


def _with_id(overrides: list[str], redo: Redo) -> list[str]:
    return [*overrides, f"run.id={run_id_of(redo.config)}"]


def _run(start: Any, store: Store, redo: Redo) -> int:
    for warning in redo.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    logging.getLogger("forge.checks").setLevel(logging.ERROR)  # the flow looks again; once is enough to say it
    run_id = run_id_of(redo.config)
    record = RunRecord(run_id, redo.config, redo.config, {}, "", 0, redo.parent)
    return run_flow(start, store, run_id, lambda: about(record))

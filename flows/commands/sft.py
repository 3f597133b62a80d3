"""The commands of supervised runs: start one, go on with one."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from flows.commands.common import loaded_sft_config, opened_store
from flows.commands.running import run_flow
from forge_core.config.sft_config import SftConfig
from forge_core.config.sft_loader import load_sft_config
from forge_core.runs.early_end import EarlyEnd
from forge_core.runs.record import RunRecord, check_new_run, resume_check, with_new_id
from forge_core.runs.sft_checks import check_sft, with_stored_sft_model
from forge_core.runs.sft_context import sft_config
from forge_core.runs.versions import best_version
from forge_core.store import Ledger, Store


def sft(args: argparse.Namespace) -> int:
    """Fine-tune a model in a new run."""
    config = loaded_sft_config(args)
    store = opened_store(args, config, quiet=True)
    config = config if config.run.id is not None else with_new_id(config, "sft")
    config = config.model_copy(update={"store": store.uri})
    check_new_run(store, config)
    _show_checks(config)

    def start() -> Any:
        from flows.sft import sft as flow

        return flow(config, return_state=True)

    return run_flow(start, store, str(config.run.id), lambda: _about(config))


def resume(args: argparse.Namespace, store: Store, record: RunRecord) -> int:
    """Go on with a stored supervised run (``forge resume``)."""
    config = load_sft_config(sft_config(record), args.overrides)
    if done := _finished(store, record.run_id, config):
        print(f"store: {store.uri}\n{done}", file=sys.stderr)
        return 0
    resume_check(store, record, config, args.allow_config_change, args.allow_code_change)
    _show_checks(with_stored_sft_model(store, record.run_id, config))

    def start() -> Any:
        from flows.sft import sft_resume

        changes = (args.overrides, args.allow_config_change, args.allow_code_change)
        return sft_resume(record.run_id, store.uri, *changes, return_state=True)

    return run_flow(start, store, record.run_id, lambda: _about(config))


def _finished(store: Store, run_id: str, config: SftConfig) -> str | None:
    """What to say of a run that has nothing left to do."""
    ledger = Ledger(store, run_id)
    head = ledger.head()
    if head >= config.steps:
        return (
            f"run {run_id} has taken all of its {config.steps} training steps; to go further: forge resume {run_id} "
            f"steps={2 * config.steps} --allow-config-change steps"
        )
    if not EarlyEnd(ledger).reached(config):
        return None
    return (
        f"run {run_id} has ended after {head} training steps, because the validation loss did not fall any more; the "
        f"best is version {best_version(store, run_id).version} (forge export {run_id} DIR --best); to go further: "
        f"forge resume {run_id} validation.patience=null --allow-config-change validation.patience"
    )


def _about(config: SftConfig) -> str:
    t = config.training
    return (
        f"{config.steps} training steps of {t.sync_interval} optimizer steps of {config.rows_per_optimizer_step} rows "
        f"of {t.seq_len} tokens"
    )


def _show_checks(config: SftConfig) -> None:
    for warning in check_sft(config):
        print(f"warning: {warning}", file=sys.stderr)
    logging.getLogger("forge.checks").setLevel(logging.ERROR)  # the flow looks again; once is enough to say it

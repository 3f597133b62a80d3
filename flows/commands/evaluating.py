"""``forge eval`` and ``forge retrain``."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.commands.common import log_to_stderr, opened_store, show
from forge_core.config import ConfigError, RunConfig
from forge_core.config.retrain_config import load_retrain_config, supervised_run
from forge_core.config.sft_config import SftConfig
from forge_core.data.prompts import check_dataset
from forge_core.data.sft_sources import check_sft_data
from forge_core.data.sources import is_pattern

FAILED, STOPPED = 1, 130


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate MODEL, and the one it is compared with, in this process; what was done before is only read."""
    from flows.stoppable import stoppable
    from forge_core.evaluation.asking import asked
    from forge_core.evaluation.evaluating import evaluate_policy
    from forge_core.evaluation.plot import evaluation_png
    from forge_core.evaluation.results import compare, read_evaluation, summarise
    from forge_core.evaluation.tables import HEAD, comparison_line, rows
    from forge_core.stop import Stopped

    if args.plot is not None:
        check_plot(args.plot)
    question = asked(args.model, args.config, args.overrides, args.store, args.against)
    print(f"store: {question.store.uri}", file=sys.stderr)
    log_to_stderr()
    note = lambda text: print(text, file=sys.stderr)
    try:
        with stoppable(question.store, question.run_id) as stop:
            found = [evaluate_policy(question.store, question.config, p, stop, note) for p in question.policies]
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return STOPPED
    evaluations = [read_evaluation(question.store, prefix) for prefix in found]
    summaries, names = [summarise(e) for e in evaluations], [p.name for p in question.policies]
    table = Table(*HEAD)
    for name, summary in zip(names, summaries, strict=True):
        for cells in rows(name, summary):
            table.add_row(*cells)
    show(table)
    if args.plot is not None:
        evaluation_png(names, summaries, args.plot)
        print(f"plot: {args.plot.absolute()}", file=sys.stderr)
    if len(evaluations) == 2:
        print(comparison_line(names, summaries, compare(evaluations[0], evaluations[1])))
    return 0


def check_plot(file: Path) -> None:
    """Raise ConfigError unless a picture can be written to ``file``."""
    if file.suffix != ".png" or not file.absolute().parent.is_dir():
        raise ConfigError(f"--plot {file}: write a file that ends with .png, in a folder that is there")


def retrain(args: argparse.Namespace) -> int:
    """Retrain now, as a schedule would."""
    overrides = [*args.overrides, *([f"store={args.store}"] if args.store else [])]
    settings, run = load_retrain_config(args.config, overrides)
    check_places(run, supervised_run(settings))  # before a server is started
    if settings.distributed:
        raise ConfigError("distributed: is true: start it where workers are: prefect deployment run retrain/nightly")
    store = opened_store(args, run, quiet=True)

    def start() -> Any:
        from flows.retrain import retrain as flow

        return flow(args.config, [*overrides, f"store={store.uri}"], args.retrain_id, args.force, return_state=True)

    return _run(start, store.uri)


def check_places(run: RunConfig, sft: SftConfig | None) -> None:
    """Raise DataError where prompts or conversations cannot be read. A pattern may match no file yet."""
    if run.dataset is not None and not is_pattern(run.dataset.path):
        check_dataset(run.dataset, seed=run.run.seed)
    if sft is not None and sft.dataset is not None and not is_pattern(sft.dataset.path or ""):
        check_sft_data(sft.dataset, key="sft.data")


def _run(start: Any, store: str) -> int:
    """Start the flow under a Prefect server and turn its final state into an exit status."""
    from flows.server import ensure_server

    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")  # before Prefect is imported
    with Console(stderr=True).status("starting the Prefect server"):
        server = ensure_server(meanwhile=lambda: import_module("flows.session"))
    try:
        print(f"Prefect UI: {server.ui_url}\nstore: {store}", file=sys.stderr, flush=True)
        return _status(start())
    finally:
        server.stop()


def _status(state: Any) -> int:
    if state.is_completed():
        print(state.message)
        return 0
    if state.is_cancelled() or state.is_cancelling():
        print(state.message, file=sys.stderr)
        return STOPPED
    error = state.result(raise_on_failure=False)
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return FAILED

"""The commands that train: check everything, start or find the Prefect server, run the flow."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import httpx
from rich.console import Console

from flows.arguments.running import ROLES
from flows.commands.common import existing_store, loaded_config, opened_store
from flows.stopping import starting
from forge_core.config import ConfigError, RunConfig, load_config
from forge_core.runs.checks import check_run, with_stored_model
from forge_core.runs.code import own_code
from forge_core.runs.early_end import is_finished
from forge_core.runs.estimate import estimate_line
from forge_core.runs.formats import SFT
from forge_core.runs.record import check_new_run, create_run, load_run, resume_check, with_new_id
from forge_core.store import Ledger, Store, StoreError

FAILED, STOPPED = 1, 130


def train(args: argparse.Namespace) -> int:
    """Train a new run."""
    store, config = _new(args)

    def start() -> Any:
        from flows.grpo import grpo

        return grpo(config, return_state=True)

    return run_flow(start, store, run_id_of(config), lambda: estimate_line(config))


def create(args: argparse.Namespace) -> int:
    """Store a new run, and say how its roles are started."""
    store, config = _new(args)
    run_id = create_run(store, config).run_id
    print(f"store: {store.uri}", file=sys.stderr)
    for name in ROLES if config.grpo.beta > 0 else [name for name in ROLES if name != "reference"]:
        print(f"start where it shall work: forge role {name} {run_id} --store {store.uri}", file=sys.stderr)
    print(run_id)
    return 0


def role(args: argparse.Namespace) -> int:
    """Work on a run as one of its roles."""
    store = opened_store(args, quiet=True)

    def start() -> Any:
        from flows import roles

        state = getattr(roles, args.role)(args.run_id, store.uri, return_state=True)
        if state.is_completed():
            print(state.message, file=sys.stderr)  # unlike a run, a role has no closing table
        return state

    return run_flow(start, store, args.run_id)


def _new(args: argparse.Namespace) -> tuple[Store, RunConfig]:
    """The store, and the checked configuration of a new run in it."""
    config = loaded_config(args)
    store = opened_store(args, config, quiet=True)
    if config.run.id is None:
        config = with_new_id(config, "grpo")
    config = config.model_copy(update={"store": store.uri})
    check_new_run(store, config)
    _show_checks(config)
    return store, config


def resume(args: argparse.Namespace) -> int:
    """Go on with a stored run."""
    store = existing_store(args, quiet=True)
    with starting(store, args.run_id):
        return _resume(args, store)


def _resume(args: argparse.Namespace, store: Store) -> int:
    record = load_run(store, args.run_id)
    if record.flow == SFT:
        from flows.commands import sft

        return sft.resume(args, store, record)
    if record.parent:
        from flows.commands import redoing

        return redoing.resume(args, store, record)
    config = load_config(record.config, args.overrides)
    if Ledger(store, args.run_id).head() >= config.steps:
        print(
            f"store: {store.uri}\nrun {args.run_id} has taken all of its {config.steps} training steps; to go further: "
            f"forge resume {args.run_id} steps={2 * config.steps} --allow-config-change steps",
            file=sys.stderr,
        )
        return 0
    resume_check(store, record, config, args.allow_config_change, args.allow_code_change)
    config = with_stored_model(store, args.run_id, config)
    _show_checks(config)

    def start() -> Any:
        from flows.grpo import grpo_resume

        changes = (args.overrides, args.allow_config_change, args.allow_code_change)
        return grpo_resume(args.run_id, store.uri, *changes, return_state=True)

    return run_flow(start, store, args.run_id, lambda: estimate_line(config))


def _show_checks(config: RunConfig) -> None:
    for warning in check_run(config):
        print(f"warning: {warning}", file=sys.stderr)
    logging.getLogger("forge.checks").setLevel(logging.ERROR)  # the flow looks again; once is enough to say it


def run_id_of(config: RunConfig) -> str:
    assert config.run.id is not None
    return config.run.id


def run_flow(start: Any, store: Store, run_id: str, about: Callable[[], str] = str) -> int:
    """Start the flow under a Prefect server and turn its final state into an exit status. Requests to stop the run
    count while the server starts.

    ``about``: a line to show before. Finding it may take seconds: the server starts meanwhile.
    """
    with starting(store, run_id):
        return _run_flow(start, store, run_id, about)


def _run_flow(start: Any, store: Store, run_id: str, about: Callable[[], str]) -> int:
    from flows.server import ensure_server

    shown: list[str] = []

    def meanwhile() -> None:
        shown.append(about())
        import_module("flows.session")

    # The progress display says what happened; the log of every task is in the UI. Set before Prefect is imported.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")
    with Console(stderr=True).status("starting the Prefect server"):
        server = ensure_server(meanwhile=meanwhile)
    try:
        lines = [f"Prefect UI: {server.ui_url}", f"store: {store.uri}", f"run: {run_id}", *filter(None, shown)]
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        return final_status(start(), store, run_id)
    except httpx.HTTPError as outage:
        return _without_server(store, run_id, outage)
    finally:
        server.stop()


def _without_server(store: Store, run_id: str, outage: httpx.HTTPError) -> int:
    """The server was gone when the flow had ended and wanted to say so: the store knows how it ended."""
    finished = is_finished(store, load_run(store, run_id))
    rest = "is complete in the store" if finished else f"is not complete; go on with: forge resume {run_id}"
    print(f"the Prefect server does not answer ({outage}); run {run_id} {rest}", file=sys.stderr)
    return 0 if finished else FAILED


def final_status(state: Any, store: Store, run_id: str) -> int:
    if state.is_completed():
        return 0
    if state.is_cancelled() or state.is_cancelling() or state.name == "Preempted":
        print(state.message, file=sys.stderr)
        return STOPPED
    error = state.result(raise_on_failure=False)  # its traceback is in the log above
    said = state.message if error is None else f"{type(error).__name__}: {error}"  # a role may end with a mere message
    print(said, *getattr(error, "__notes__", []), sep="\n  ", file=sys.stderr)
    print(
        f"run {run_id} failed; after mending the cause: forge resume {run_id}{_code_hint(store, run_id)}",
        file=sys.stderr,
    )
    return FAILED


def _code_hint(store: Store, run_id: str) -> str:
    """What else a resumption needs where the cause may lie in code of one's own, which the run knows by its digest."""
    try:
        record = load_run(store, run_id)
    except (ConfigError, StoreError):  # it failed before it was stored, or because the store does
        return ""
    return (
        " (with --allow-code-change where you mended code that it names)"
        if own_code(record.config, record.flow)
        else ""
    )

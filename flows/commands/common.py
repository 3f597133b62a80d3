"""What several commands share: finding the store, the configuration and a run."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from forge_core.config import ConfigError, RunConfig, load_config, store_uri
from forge_core.config.any_config import AnyConfig
from forge_core.config.sft_config import SftConfig
from forge_core.config.sft_loader import load_sft_config
from forge_core.models.stored import RunVersion
from forge_core.runs.record import RunRecord, load_run
from forge_core.store import Ledger, Store, StoreError, open_store

REGISTERED = "model://"  # before the name of a model in the registry
UNLIMITED = 10_000  # columns: more than any table has


def opened_store(
    args: argparse.Namespace, config: AnyConfig | None = None, *, quiet: bool = False, probe: bool = True
) -> Store:
    """The store of this command, printed (on standard error, so that output stays readable by machines)."""
    store = open_store(store_uri(args.store, config), probe=probe)
    if not quiet:
        print(f"store: {store.uri}", file=sys.stderr)
    return store


def existing_store(args: argparse.Namespace, *, quiet: bool = False, probe: bool = True) -> Store:
    """The store of a command that makes nothing new; without ``probe`` it may be full. Raises StoreError for a folder
    that is not there."""
    uri = store_uri(args.store)
    folder = Path(uri.removeprefix("file://")).expanduser()
    if ("://" not in uri or uri.startswith("file://")) and not folder.is_dir():
        raise StoreError(
            f"there is no store at {folder.absolute()}: go to the folder where the run was started, or name the store "
            "with --store or FORGE_STORE"
        )
    return opened_store(args, quiet=quiet, probe=probe)


def show(table: Table) -> None:
    """Print a table on standard output: fitted to a terminal, else in full, in plain characters. Its texts are shown as
    they are, whatever rich would read in them."""
    if sys.stdout.isatty():
        return Console(markup=False, emoji=False).print(table)
    table.box = box.ASCII
    Console(width=UNLIMITED, markup=False, emoji=False).print(table)


def log_to_stderr() -> None:
    """What Forge logs, such as the progress of a warm start, as plain lines on standard error."""
    log = logging.getLogger("forge")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.INFO)


def loaded_config(args: argparse.Namespace) -> RunConfig:
    """CONFIG with its overrides; ``--store`` wins over the file."""
    config = load_config(args.config, args.overrides)
    return config if getattr(args, "store", None) is None else config.model_copy(update={"store": args.store})


def loaded_sft_config(args: argparse.Namespace) -> SftConfig:
    """CONFIG with its overrides; ``--store`` wins over the file."""
    config = load_sft_config(args.config, args.overrides)
    return config if getattr(args, "store", None) is None else config.model_copy(update={"store": args.store})


def stored_run(args: argparse.Namespace) -> tuple[Store, RunRecord, Ledger]:
    """The run that RUN_ID names. Raises ConfigError when the store has none."""
    store = existing_store(args)
    record = load_run(store, args.run_id)
    return store, record, Ledger(store, args.run_id)


def registered_version(store: Store, name: str) -> RunVersion:
    """The version that ``model://NAME`` means now: the production model, or the candidate of ``model://NAME/candidate``.
    Raises ModelError, StoreError."""
    from forge_core.evaluation.policies import find_policy

    version = find_policy(store, name).version
    assert version is not None  # what the registry names is a version of a run
    return version


def committed_version(ledger: Ledger, run_id: str, wanted: int | None) -> int:
    """``wanted``, or the newest version. Raises ConfigError when it is not committed."""
    head = ledger.head()
    if head < 0:
        raise ConfigError(f"run {run_id!r} has no version yet: it stopped before version 0 was made")
    if wanted is not None and not 0 <= wanted <= head:
        raise ConfigError(f"--version {wanted}: run {run_id!r} has the versions 0 to {head}")
    return head if wanted is None else wanted

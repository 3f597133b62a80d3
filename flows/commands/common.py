"""What several commands share: finding the store, the configuration and a run."""

from __future__ import annotations

import argparse
import sys

from forge_core.config import ConfigError, RunConfig, load_config, store_uri
from forge_core.runs.record import RunRecord, load_run
from forge_core.store import Ledger, Store, open_store


def opened_store(args: argparse.Namespace, config: RunConfig | None = None, *, quiet: bool = False) -> Store:
    """The store of this command, printed (on standard error, so that output stays readable by machines)."""
    store = open_store(store_uri(args.store, config))
    if not quiet:
        print(f"store: {store.uri}", file=sys.stderr)
    return store


def loaded_config(args: argparse.Namespace) -> RunConfig:
    """CONFIG with its overrides; ``--store`` wins over the file."""
    config = load_config(args.config, args.overrides)
    return config if getattr(args, "store", None) is None else config.model_copy(update={"store": args.store})


def stored_run(args: argparse.Namespace) -> tuple[Store, RunRecord, Ledger]:
    """The run that RUN_ID names. Raises ConfigError when the store has none."""
    store = opened_store(args)
    record = load_run(store, args.run_id)
    return store, record, Ledger(store, args.run_id)


def committed_version(ledger: Ledger, run_id: str, wanted: int | None) -> int:
    """``wanted``, or the newest version. Raises ConfigError when it is not committed."""
    head = ledger.head()
    if head < 0:
        raise ConfigError(f"run {run_id!r} has no version yet: it stopped before version 0 was made")
    if wanted is not None and not 0 <= wanted <= head:
        raise ConfigError(f"--version {wanted}: run {run_id!r} has the versions 0 to {head}")
    return head if wanted is None else wanted

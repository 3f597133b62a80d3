"""What the commands' arguments have in common."""

from __future__ import annotations

import argparse
from typing import Any

STORE_HELP = "root of the store (default: the configuration's store, then FORGE_STORE, then ./forge-store)"
OVERRIDES_HELP = "keys to change: a.b=c sets, ~a.b removes"


class Commands:
    """The sub-commands of ``forge``."""

    def __init__(self, subparsers: Any) -> None:
        self._subparsers = subparsers

    def add(
        self,
        name: str,
        help: str,
        *,
        config: bool = False,
        run_id: bool = False,
        store: bool = True,
        overridable: bool = False,
    ) -> argparse.ArgumentParser:
        """A command with the usual arguments: CONFIG or RUN_ID, ``--store``, and keys to change."""
        command: argparse.ArgumentParser = self._subparsers.add_parser(name, help=help, description=help)
        if config:
            command.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        if run_id:
            command.add_argument("run_id", metavar="RUN_ID", help="name of the run (forge runs lists them)")
        if store:
            command.add_argument("--store", help=STORE_HELP)
        if overridable:
            command.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help=OVERRIDES_HELP)
        return command


def gibibytes(text: str) -> float:
    """A size above 0 (for argparse)."""
    size = float(text)
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return size


def positive(text: str) -> int:
    """A whole number of at least 1 (for argparse)."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number

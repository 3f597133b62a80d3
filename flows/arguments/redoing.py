"""Commands that do one stage of a stored run again."""

from __future__ import annotations

import argparse

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    rescore = commands.add(
        "rescore", "grade the stored episodes of a run again, as a new run", run_id=True, overridable=True
    )
    rescore.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="PATH[:WEIGHT]",
        help="a reward to grade with, in place of the run's",
    )
    _allow_code(rescore)
    retrain = commands.add(
        "retrain-from", "train a new run from the stored episodes of another one", run_id=True, overridable=True
    )
    retrain.add_argument("--loss", metavar="NAME|PATH", help="another loss: its name, or <file.py>:<name>")
    retrain.add_argument(
        "--from-version", type=int, default=0, metavar="N", help="the run's version to start from (default 0)"
    )
    _allow_code(retrain)


def _allow_code(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow-code-change", action="store_true", help="accept that code which the run names has changed"
    )

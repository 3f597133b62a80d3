"""The arguments of every ``forge`` command, one group a module. Nothing here imports what a command needs to run."""

from __future__ import annotations

import argparse

from flows.arguments import data, deploying, operating, querying, redoing, registry, reporting, running, sft
from flows.arguments.common import Commands

GROUPS = (running, data, sft, deploying, operating, querying, reporting, redoing, registry)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="forge", description="Post-train language models with reinforcement learning.")
    commands = Commands(top.add_subparsers(dest="command", metavar="COMMAND"))
    for group in GROUPS:
        group.add_to(commands)
    return top

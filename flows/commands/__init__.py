"""The work of each ``forge`` command. A command imports what it needs when it runs, so that bad input is answered fast.

Invariants: a command prints the store it uses; it raises one of ``INPUT_ERRORS`` for bad input, one of ``FAILURES``
for a machine that does not do its part, and returns its exit status otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from flows.home import ServerError
from forge_core.config import ConfigError
from forge_core.data.errors import DataError
from forge_core.environments.errors import BrokenEnvironment
from forge_core.models.errors import ModelError
from forge_core.rewards.resolve import RewardError
from forge_core.store import StoreError

INPUT_ERRORS = (BrokenEnvironment, ConfigError, DataError, ModelError, RewardError, StoreError)
FAILURES = (ServerError,)  # errors that say what to do without a traceback

COMMANDS = {  # name -> module of this package, and its function
    "chat": "chatting:chat",
    "config": "inspection:config",
    "convert": "models:convert",
    "data": "data:data",
    "deploy": "deploying:deploy",
    "create": "running:create",
    "doctor": "inspection:doctor",
    "du": "storing:du",
    "eval": "evaluating:evaluate",
    "export": "models:export",
    "gc": "storing:gc",
    "join": "slurm:join",
    "ledger": "inspection:ledger",
    "logs": "storing:logs",
    "models": "registry:models",
    "new": "scaffold:new",
    "promote": "registry:promote",
    "query": "querying:query",
    "report": "reporting:report",
    "rescore": "redoing:rescore",
    "resume": "running:resume",
    "retrain-from": "redoing:retrain_from",
    "retrain": "evaluating:retrain",
    "rm": "storing:rm",
    "role": "running:role",
    "rollback": "registry:rollback",
    "runs": "inspection:runs",
    "server": "deploying:server",
    "sft": "sft:sft",
    "slurm": "slurm:slurm",
    "stop": "inspection:stop",
    "train": "running:train",
    "try": "trying:try_prompts",
    "watch": "reporting:watch",
}


def command(name: str) -> Callable[[Any], int]:
    """The function that does the work of the command ``name``."""
    module, _, function = COMMANDS[name].partition(":")
    found: Callable[[Any], int] = getattr(import_module(f"flows.commands.{module}"), function)
    return found

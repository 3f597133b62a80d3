"""The work of each ``forge`` command. A command imports what it needs when it runs, so that bad input is answered fast.

Invariants: a command prints the store it uses; it raises one of ``INPUT_ERRORS`` for bad input, one of ``FAILURES``
for a machine that does not do its part, and returns its exit status otherwise.
"""

from collections.abc import Callable
from typing import Any

from flows.commands.inspection import config, doctor, ledger, runs, stop
from flows.commands.models import convert, export
from flows.commands.running import resume, train
from flows.commands.scaffold import new
from flows.commands.slurm import join, slurm
from flows.commands.trying import try_prompts
from flows.home import ServerError
from forge_core.config import ConfigError
from forge_core.data.errors import DataError
from forge_core.models.errors import ModelError
from forge_core.rewards.resolve import RewardError
from forge_core.store import StoreError

INPUT_ERRORS = (ConfigError, DataError, ModelError, RewardError, StoreError)
FAILURES = (ServerError,)  # errors that say what to do without a traceback

COMMANDS: dict[str, Callable[[Any], int]] = {
    "config": config,
    "convert": convert,
    "doctor": doctor,
    "export": export,
    "join": join,
    "ledger": ledger,
    "new": new,
    "resume": resume,
    "runs": runs,
    "slurm": slurm,
    "stop": stop,
    "train": train,
    "try": try_prompts,
}

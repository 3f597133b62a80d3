"""What all tasks share: no persisted results, no caching by Prefect, retries for I/O errors only."""

from __future__ import annotations

from typing import Any

from prefect import runtime
from prefect.cache_policies import NO_CACHE

from forge_core.overdue import Overdue
from forge_core.runs.context import RunContext, context_of
from forge_core.store import CorruptObject, IdentityError, LedgerError, NotFound, StoreError
from forge_core.weights.registry import RegistryError


def is_io_error(task: Any, run: Any, state: Any) -> bool:
    """Whether a failed attempt is worth repeating: the store or the network, nothing else. A time limit of ours that is
    up is neither, though Python calls every TimeoutError an OSError."""
    error = state.result(raise_on_failure=False)
    lasting = (Overdue, NotFound, IdentityError, CorruptObject, LedgerError, RegistryError)
    return isinstance(error, OSError | StoreError) and not isinstance(error, lasting)


OPTIONS: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": 2,
    "retry_delay_seconds": [1, 5],
    "retry_condition_fn": is_io_error,
}


def argument(name: str) -> Any:
    """An argument of the task run that is starting (for its name)."""
    return runtime.task_run.parameters[name]


def context() -> RunContext:
    """The run of the task that is starting."""
    return context_of(argument("run"))

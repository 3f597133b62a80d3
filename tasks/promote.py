"""Promote: judge a candidate by the gate, and write the decision into the registry."""

from typing import Any

from prefect import task

from forge_core.retraining.beginning import Retraining
from forge_core.retraining.judging import Contest, decide
from forge_core.stop import StopToken
from forge_core.store import open_store
from tasks.options import OPTIONS


@task(name="promote", task_run_name="promote or reject {work.retrain_id}", **OPTIONS)
def promote_or_reject(
    store: str, work: Retraining, contest: Contest, evaluations: dict[str, str], stop: StopToken
) -> dict[str, Any] | None:
    """Returns the registry entry; None: the production model changed meanwhile."""
    return decide(open_store(store), work, contest, evaluations, stop)

"""A run in roles, from one flow: the coordinator starts the role deployments, looks after them, and ends with the run.

It holds no state of its own: killed and started again it finds its run in the store and its roles on the server.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.coordination import Coordination
from flows.crew import Crew
from flows.parameters import ConfigParameter
from flows.session import run_name


@flow(name="grpo-distributed", flow_run_name=run_name)
def grpo_distributed(
    config: ConfigParameter | None = None, overrides: dict[str, Any] | None = None, resume: str | None = None
) -> Any:
    """Train with GRPO in roles, each on its own work pool. ``config`` and ``overrides``: as of ``grpo``; ``resume``:
    the id of a stored run to go on with instead."""
    with Coordination(config, overrides or {}, resume) as run:
        coordinate(run)
    return run.outcome


def coordinate(run: Coordination) -> None:
    """Look after the roles until every training step is committed."""
    with Crew(run.context, run.frontier) as crew:
        while not run.finished():
            crew.look_after()
            run.show_progress()
            run.pause()

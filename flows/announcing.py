"""What evaluations and retrainings tell the Prefect server: events for automations, and reports.

Best effort: the store has all of it, so a server that does not answer neither fails nor delays anything for long.
"""

from __future__ import annotations

import re
from contextvars import copy_context
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event

from forge_core.observability.best_effort import BestEffort

WAIT_S = 20.0


def announce(event: str, model: str, payload: dict[str, Any], report: str) -> None:
    """Emit ``event`` about the model, and attach ``report`` (Markdown) to the flow run."""
    calls = BestEffort(limit_s=WAIT_S, name="announcements")
    calls.submit(emit_event, event, resource={"prefect.resource.id": f"forge.model.{model}"}, payload=payload)
    in_flow_run = copy_context().run  # an artifact belongs to the flow run of its context
    calls.submit(in_flow_run, create_markdown_artifact, report, key=_key(f"report-{model}"))
    calls.close(WAIT_S)


def _key(name: str) -> str:
    """A name that Prefect takes: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

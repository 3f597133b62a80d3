"""What evaluations and retrainings tell the Prefect server: events for automations, reports, tables, pictures.

Best effort: the store has all of it, so a server that does not answer neither fails nor delays anything for long.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact
from prefect.events import emit_event

from forge_core.observability.best_effort import BestEffort

WAIT_S = 20.0


def announce(event: str, model: str, payload: dict[str, Any], report: str) -> None:
    """Emit ``event`` about the model, and attach ``report`` (Markdown) to the flow run."""
    emit = lambda: emit_event(event, resource={"prefect.resource.id": f"forge.model.{model}"}, payload=payload)
    _tell(emit, lambda: create_markdown_artifact(report, key=_key(f"report-{model}")))


def show(model: str, table: list[dict[str, str]], png: bytes) -> None:
    """Attach a table and a picture of the model's evaluation to the flow run."""
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    about = f"evaluation of {model}"
    _tell(
        lambda: create_table_artifact(table, key=_key(f"evaluation-{model}"), description=about),
        lambda: create_image_artifact(url, key=_key(f"evaluation-plot-{model}"), description=about),
    )


def _tell(*calls: Callable[[], Any]) -> None:
    waiting = BestEffort(limit_s=WAIT_S, name="announcements")
    for call in calls:
        waiting.submit(copy_context().run, call)  # an artifact belongs to the flow run of its context
    waiting.close(WAIT_S)


def _key(name: str) -> str:
    """A name that Prefect takes: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

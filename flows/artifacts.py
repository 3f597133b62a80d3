"""A run in the Prefect UI: a progress bar, a table of steps, and the figures of its report, while it trains.

Guarantees:
- :meth:`RunArtifacts.step` costs the flow's thread microseconds: everything that talks to the server happens in a
  ``forge_core.observability.best_effort.BestEffort``, with short timeouts and without retries.
- Updates are merged: at most one waits, and the server gets at most one a second however fast steps are. Figures are
  drawn anew once a minute, and never for more than a fiftieth of the time.
- Artifacts belong to the flow run; what they show is in the ledger, so losing one loses nothing.
"""

from __future__ import annotations

import base64
import io
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate

from flows.asking_once import client_asking_once
from forge_core.observability.best_effort import BestEffort
from forge_core.observability.progress import COLUMNS, Entry, spread
from forge_core.report.figures import Drawing, curves_of
from forge_core.report.themes import png

Figures = Callable[[Sequence[Entry]], Iterable[Drawing]]  # of ledger entries, one after the other
TIMEOUT_S, UPDATE_S = 5.0, 1.0
FIGURES_S, SHARE = 60.0, 50.0  # seconds between two drawings; these take at most one part in so many of the time
DRAWING_S = 5.0  # of one drawing of all figures, while the run goes on or when it was stopped
LAST_S = 20.0  # of the last one of a run that is complete: a busy machine takes seconds for each
SENDING_S = 5.0  # beyond these, for what is under way
TABLE_ROWS = 200  # an artifact is sent whole on each update


class RunArtifacts:
    """The artifacts of one flow run; ``total`` is the number of training steps, ``columns`` those of their table,
    ``figures`` what draws their figures (None: there are none)."""

    def __init__(
        self,
        best_effort: BestEffort,
        flow_run_id: object,
        run_id: str,
        total: int,
        columns: Mapping[str, Callable[[Entry], str]] = COLUMNS,
        figures: Figures | None = curves_of,
    ) -> None:
        self._columns, self._figures = columns, figures
        self._best_effort = best_effort
        self._flow_run_id = UUID(str(flow_run_id))
        self._name = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
        self._run_id = run_id
        self._total = total
        self._entries: list[Entry] = []
        self._ids: dict[str, UUID] = {}
        self._waiting = False
        self._updated = 0.0
        self._next_figures = time.monotonic() + FIGURES_S

    def step(self, entry: Entry) -> None:
        """Show a committed ledger entry."""
        self._entries.append(entry)
        if not self._waiting and time.monotonic() - self._updated >= UPDATE_S:
            self._waiting = True  # before the update can run and clear it
            if not self._best_effort.submit(self._update):
                self._waiting = False

    def finish(self, entries: Sequence[Entry], limit_s: float = DRAWING_S) -> None:
        """Show the final state of all ``entries``, and the figures that are drawn in ``limit_s`` seconds."""
        self._entries = list(entries)
        self._best_effort.submit(self._update)
        self._best_effort.submit(self._draw, time.monotonic() + limit_s)

    def _update(self) -> None:
        self._waiting, self._updated = False, time.monotonic()
        entries = list(self._entries)
        rows = [{name: cell(entry) for name, cell in self._columns.items()} for entry in spread(entries, TABLE_ROWS)]
        newest = entries[-1]["batch"] + 1 if entries else 0
        with client_asking_once(TIMEOUT_S) as client:
            self._put(client, "progress", "progress", 100.0 * newest / self._total)
            self._put(client, "table", "steps", json.dumps(rows))
        if time.monotonic() >= self._next_figures:
            began = time.monotonic()
            self._draw(began + DRAWING_S)
            ended = time.monotonic()
            self._next_figures = ended + max(FIGURES_S, SHARE * (ended - began))

    def _draw(self, until: float) -> None:
        """Draw and send the figures, those in time before ``until`` (monotonic)."""
        for one in self._figures(list(self._entries)) if self._figures else ():
            image = io.BytesIO()
            if time.monotonic() >= until:
                return
            if png(one.draw, image):
                data = "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
                with client_asking_once(TIMEOUT_S) as client:
                    self._put(client, "image", one.name, data)

    def _put(self, client: SyncPrefectClient, kind: str, what: str, data: Any) -> None:
        if what in self._ids:
            # Not client.update_artifact: it would also send the whole table as an event, which the server keeps.
            client.request("PATCH", "/artifacts/{id}", json={"data": data}, path_params={"id": self._ids[what]})
            return
        created = client.create_artifact(
            ArtifactCreate(
                type=kind,
                key=f"{self._name}-{what}",
                description=f"{what} of run {self._run_id}{self._left_out(what)}",
                data=data,
                flow_run_id=self._flow_run_id,
            )
        )
        self._ids[what] = created.id

    def _left_out(self, what: str) -> str:
        """What the table does not show of a long run."""
        some = what == "steps" and self._total > TABLE_ROWS
        return f": {TABLE_ROWS} of them at most, evenly spaced; all: forge ledger {self._run_id}" if some else ""

"""Metrics on the terminal: a table of each step, on standard error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from forge_core.config.metric_sections import ConsoleSection
from forge_core.observability.backends import Origin
from forge_core.observability.metrics import Metric


class _Open(Console):
    """Its reader may go away: a pipe that closes must not end a run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ConsoleBackend:
    def __init__(self, section: ConsoleSection, origin: Origin, console: Console | None = None) -> None:
        self._keys, self._run_id = tuple(section.show), origin.run_id
        self._console = console or _Open(stderr=True, markup=False, emoji=False)

    def last_step(self) -> None:
        return None

    def log(self, step: int, values: Mapping[str, float], tables: Mapping[str, list[dict[str, Any]]]) -> None:
        table = Table("metric", "value", title=f"{self._run_id}: training step {step}", title_justify="left")
        for key in sorted(key for key in values if self._shows(key)):
            table.add_row(key, f"{values[key]:.6g}")
        self._console.print(table)
        for key, rows in tables.items():
            self._console.print(f"{key}: {len(rows)} rows, the first: {rows[0]}", highlight=False, markup=False)

    def log_value(self, metric: Metric) -> None:
        self._console.print(f"{metric.key} {metric.value}", highlight=False, markup=False)

    def close(self) -> None:
        pass

    def _shows(self, key: str) -> bool:
        return key.startswith(self._keys) if self._keys else not key.startswith("time/")

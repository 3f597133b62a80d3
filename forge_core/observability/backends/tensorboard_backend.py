"""Metrics as event files of TensorBoard: ``<folder>/<name>/``, of other processes ``<folder>/<name>/<role>/``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.config.metric_sections import TensorBoardSection
from forge_core.observability.backends import Origin
from forge_core.observability.metrics import Metric

MARK = "episodes/planned"  # in every step


class TensorBoardBackend:
    def __init__(self, section: TensorBoardSection, origin: Origin) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = Path(section.folder).expanduser() / origin.name / origin.role
        self._last = self._stored_step()
        self._writer: Any = SummaryWriter(str(self._folder))
        self._recorded: Counter[str] = Counter()

    def last_step(self) -> int:
        return self._last

    def log(self, step: int, values: Mapping[str, float], tables: Mapping[str, list[dict[str, Any]]]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        for key, rows in tables.items():
            self._writer.add_text(key, "```\n" + "\n".join(json.dumps(row) for row in rows) + "\n```", step)
        self._writer.flush()

    def log_value(self, metric: Metric) -> None:
        key = f"values/{metric.key}"
        self._writer.add_scalar(key, float(metric.value), self._recorded[key], walltime=metric.timestamp)
        self._recorded[key] += 1

    def close(self) -> None:
        self._writer.close()

    def _stored_step(self) -> int:
        """The last step in the event files of earlier processes."""
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        events = (e for path in self._folder.glob("events.out.*") for e in EventFileLoader(str(path)).Load())
        return max((e.step for e in events if any(v.tag == MARK for v in e.summary.value)), default=-1)

"""Metrics as lines of JSON: ``<folder>/<name>.jsonl``, and ``<name>-<role>-<pid>.jsonl`` of other processes.

A line is ``{"step": 3, "values": {...}, "tables": {...}}``, or ``{"key": ..., "value": ..., "time": ...}`` for a value
as it was recorded. Lines are written whole; half a line, of a process that was killed, is cut off by the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.config.metric_sections import JsonlSection
from forge_core.observability.backends import Origin
from forge_core.observability.metrics import Metric


class JsonlBackend:
    def __init__(self, section: JsonlSection, origin: Origin) -> None:
        suffix = f"-{origin.role}-{os.getpid()}" if origin.role else ""
        self.path = Path(section.folder).expanduser() / f"{origin.name}{suffix}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        self._file.seek(0)
        body = self._file.read()
        whole = body.rfind(b"\n") + 1
        self._file.truncate(whole)
        steps = [json.loads(line).get("step", -1) for line in body[:whole].splitlines()]
        self._last: int = max(steps, default=-1)

    def last_step(self) -> int:
        return self._last

    def log(self, step: int, values: Mapping[str, float], tables: Mapping[str, list[dict[str, Any]]]) -> None:
        self._write({"step": step, "values": dict(values), **({"tables": tables} if tables else {})})

    def log_value(self, metric: Metric) -> None:
        self._write({"key": metric.key, "value": metric.value, "time": metric.timestamp, "rank": metric.rank})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, default=str).encode() + b"\n")
        self._file.flush()

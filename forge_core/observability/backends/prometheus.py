"""The newest metrics of a process for Prometheus: on a port, in a file for the node exporter's collector, or both.

Every metric is the gauge ``forge_metric`` with the labels ``run``, ``role`` and ``key``: a metric's own name may hold
what a Prometheus name may not. ``forge_training_step`` is the newest committed step that this process knows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.config.metric_sections import PrometheusSection
from forge_core.observability.backends import Origin
from forge_core.observability.metrics import Metric


class PrometheusBackend:
    def __init__(self, section: PrometheusSection, origin: Origin) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._registry = CollectorRegistry()
        labels = ["run", "role", "key"]
        self._metric = Gauge("forge_metric", "The newest value of a metric.", labels, registry=self._registry)
        self._step = Gauge(
            "forge_training_step", "Newest committed training step.", labels[:2], registry=self._registry
        )
        self._labels = (origin.run_id, origin.role or "trainer")
        self._file: Path | None = None
        if section.textfile is not None:
            folder = Path(section.textfile).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / f"forge-{origin.run_id}-{self._labels[1]}-{os.getpid()}.prom"
        self._server: Any = None
        if section.port is not None:
            self._server, _ = start_http_server(section.port, section.host, registry=self._registry)

    def last_step(self) -> None:
        return None

    def log(self, step: int, values: Mapping[str, float], tables: Mapping[str, list[dict[str, Any]]]) -> None:
        self._step.labels(*self._labels).set(step)
        for key, value in values.items():
            self._metric.labels(*self._labels, key).set(value)
        self._publish()

    def log_value(self, metric: Metric) -> None:
        self._metric.labels(*self._labels, metric.key).set(float(metric.value))
        self._publish()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)  # of a process that has ended nothing is new

    def _publish(self) -> None:
        if self._file is not None:
            from prometheus_client import write_to_textfile

            write_to_textfile(str(self._file), self._registry)

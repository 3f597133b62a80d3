"""Metrics in MLflow: one MLflow run for a run, found again by its tag ``forge.run``.

It is running while a process shows the run's steps, finished when that has ended, and running again when the run goes
on. A process that was killed leaves it running, as every client of MLflow does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from forge_core.config.metric_sections import MlflowSection
from forge_core.observability.backends import Origin
from forge_core.observability.metrics import Metric

MARK = "episodes/planned"  # in every step
TAG = "forge.run"
MOST = 500  # metrics of one request: MLflow takes 1000


class MlflowBackend:
    def __init__(self, section: MlflowSection, origin: Origin) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=section.tracking_uri)
        self._recorded: Counter[str] = Counter()
        self._run = self._found(section.experiment, origin)

    def last_step(self) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._run, MARK)), default=-1)

    def log(self, step: int, values: Mapping[str, float], tables: Mapping[str, list[dict[str, Any]]]) -> None:
        from mlflow.entities import Metric as Logged

        now = int(time.time() * 1000)
        found = [Logged(_name(key), value, now, step) for key, value in sorted(values.items()) if key != MARK]
        for first in range(0, len(found), MOST):
            self._client.log_batch(self._run, metrics=found[first : first + MOST])
        for key, rows in tables.items():
            self._client.log_dict(self._run, {"rows": rows}, f"tables/{_name(key)}/{step:08d}.json")
        self._client.log_metric(self._run, MARK, values.get(MARK, 0.0), step=step)  # last: the step is whole

    def log_value(self, metric: Metric) -> None:
        key = f"values/{_name(metric.key)}"
        at = int(metric.timestamp * 1000)
        self._client.log_metric(self._run, key, float(metric.value), timestamp=at, step=self._recorded[key])
        self._recorded[key] += 1

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _found(self, experiment: str, origin: Origin) -> str:
        known = self._client.get_experiment_by_name(experiment)
        where = known.experiment_id if known else self._client.create_experiment(experiment)
        runs = self._client.search_runs([where], f"tags.`{TAG}` = '{origin.name}'")
        if runs:
            self._client.update_run(runs[0].info.run_id, status="RUNNING")
            return str(runs[0].info.run_id)
        run_id = str(self._client.create_run(where, run_name=origin.run_id, tags={TAG: origin.name}).info.run_id)
        for key, value in _flat(origin.config):
            self._client.log_param(run_id, _name(key), str(value)[:500])
        return run_id


def _name(key: str) -> str:
    """MLflow takes letters, digits and ``_ - . : /`` and spaces."""
    return "".join(c if c.isalnum() or c in "_-./: " else "_" for c in key)


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield f"{before}{key}", value

"""Who reads the clock of its machine: only to write down a time for people, or to tell them about the clock itself.

Ages that decide something are measured on one clock: the process's own monotonic one, or that of the store.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLOCKS = re.compile(r"\b(time\.time(_ns)?\b|datetime\.(now|utcnow|today)\b|date\.today\b)")
RECORDS = {  # file -> what it writes down, or shows
    "flows/doctor_store.py": "the difference to the store's clock",
    "flows/stopping.py": "when a stop was asked for",
    "forge_core/observability/backends/mlflow_backend.py": "when a value was logged, for MLflow's axis",
    "forge_core/observability/metrics.py": "when a value was recorded",
    "forge_core/report/page.py": "when a page was made",
    "forge_core/runs/episodes.py": "when an episode was sampled",
    "forge_core/runs/record.py": "when a run or a step began and ended; the name of a run, which put_new makes unique",
    "forge_core/runs/recording.py": "when a shard's values were recorded",
    "forge_core/runs/stages.py": "when a shard was finished",
    "forge_core/sandbox/image.py": "when an image of this host was used last",
    "forge_core/store/memory.py": "the clock of a store in memory",
    "forge_core/weights/host_cache.py": "when a folder of this host was used last",
    "forge_core/weights/registry.py": "when a model was promoted",
}


def test_machines_clocks_are_read_for_records_only() -> None:
    files = (file for package in ("forge_core", "tasks", "flows") for file in (ROOT / package).rglob("*.py"))
    readers = {file.relative_to(ROOT).as_posix() for file in files if CLOCKS.search(file.read_text())}
    assert readers == RECORDS.keys()

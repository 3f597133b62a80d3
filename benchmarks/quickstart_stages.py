"""Seconds per step of the quickstart, by stage, and what orchestration costs.

    python benchmarks/quickstart_stages.py

Runs the quickstart twice through the real command. On-policy (max_staleness=0) every stage of a step happens one after
the other, so what a step takes beyond generate, grade, reference and train is orchestration: planning, Prefect, the
store, the ledger, digests. Then as configured (max_staleness=1), where generation hides behind training.
Correctness first: the ledger must have every step, and the reward must have risen.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from machine import provenance, write

ROOT = Path(__file__).parent.parent
STEPS, WARM_UP = 40, 5
STAGES = ("time/generate", "time/score", "time/reference", "time/train")


def run(store: Path, run_id: str, staleness: int) -> list[dict[str, Any]]:
    forge = [str(Path(sys.executable).with_name("forge"))]
    overrides = [f"run.id={run_id}", f"steps={STEPS}", f"max_staleness={staleness}", "eval.interval=0"]
    command = [*forge, "train", str(ROOT / "configs/quickstart.yaml"), "--store", str(store), *overrides]
    subprocess.run(command, check=True, cwd=store)
    shown = subprocess.run(
        [*forge, "ledger", run_id, "--json", "--store", str(store)], check=True, capture_output=True, text=True
    )
    return [json.loads(line) for line in shown.stdout.splitlines()]


def steps_of(entries: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Per step after the warm-up: wall time between commits, and the seconds of each stage."""
    ends = [datetime.fromisoformat(e["finished_at"]).timestamp() for e in entries]
    rows = []
    for before, end, entry in zip(ends[WARM_UP:-2], ends[WARM_UP + 1 : -1], entries[WARM_UP + 1 : -1], strict=True):
        stages = {name: entry["metrics"][name] for name in STAGES}
        rows.append({"wall": end - before, **stages, "time/publish": entry["metrics"]["time/publish"]})
    return rows


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    return {f"{name}_median_s": round(median(r[name] for r in rows), 4) for name in rows[0]}


def main() -> None:
    result = {"benchmark": "quickstart_stages", **provenance(), "steps": STEPS, "warm_up_steps": WARM_UP}
    with tempfile.TemporaryDirectory() as folder:
        on_policy, overlapped = (run(Path(folder), f"s{s}", s) for s in (0, 1))
    for entries in (on_policy, overlapped):
        assert [e["batch"] for e in entries] == list(range(STEPS))
        assert mean(e["metrics"]["reward/mean"] for e in entries[-5:]) > 0.8
    rows = steps_of(on_policy)
    overhead = [r["wall"] - sum(r[name] for name in STAGES) for r in rows]
    result["on_policy"] = summary(rows)
    result["overlapped"] = summary(steps_of(overlapped))
    result["orchestration_s"] = {
        "median": round(median(overhead), 4),
        "mean": round(mean(overhead), 4),
        "max": round(max(overhead), 4),
        "target": 0.5,
    }
    write("quickstart_stages", result)


if __name__ == "__main__":
    main()

"""Does the quickstart learn, whatever the seed, and how long does it take?

    python benchmarks/quickstart_seeds.py

Runs ``configs/quickstart.yaml`` once for each of three seeds through the real command, as ``make quickstart`` does, and
records the reward on held-out prompts at each evaluation, the reward of each training batch, and the wall time of the
whole command. A run that ends below the goal is recorded, not hidden; the exit status is then 1.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import provenance, write
from trained import train

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
SEEDS = (0, 1, 2)
START, GOAL, LIMIT_S = 0.5, 0.95, 300.0


def run_seed(folder: Path, seed: int) -> dict[str, Any]:
    """One whole run in ``folder``: its curve, its seconds, and whether it began and ended as it should."""
    run = train(folder, CONFIG, f"seed-{seed}", f"run.seed={seed}")
    return {
        "seed": seed,
        "status": run.status,
        "reached": run.status == 0 and run.first <= START and run.last >= GOAL and run.seconds <= LIMIT_S,
        "seconds": round(run.seconds, 1),
        **run.curves(),
    }


def main() -> int:
    result: dict[str, Any] = {"benchmark": "quickstart_seeds", **provenance()}
    result["goal"] = {"first_at_most": START, "last_at_least": GOAL, "seconds_at_most": LIMIT_S}
    with tempfile.TemporaryDirectory() as folder:
        result["seeds"] = [run_seed(Path(folder), seed) for seed in SEEDS]
    write("quickstart_seeds", result)
    return 0 if all(run["reached"] for run in result["seeds"]) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Does the quickstart learn, whatever the seed, and how long does it take?

    python benchmarks/quickstart_seeds.py

Runs ``configs/quickstart.yaml`` once for each of three seeds through the real command, as ``make quickstart`` does, and
records the reward on held-out prompts at each evaluation, the reward of each training batch, and the wall time of the
whole command. A run that ends below the goal is recorded, not hidden; the exit status is then 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import provenance, write

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
FORGE = Path(sys.executable).with_name("forge")
SEEDS = (0, 1, 2)
START, GOAL, LIMIT_S = 0.5, 0.95, 300.0


def run_seed(folder: Path, seed: int) -> dict[str, Any]:
    """One whole run in ``folder``: its curve, its seconds, and whether it began and ended as it should."""
    name, started = f"seed-{seed}", time.monotonic()
    arguments = ["train", str(CONFIG), f"run.seed={seed}", f"run.id={name}"]
    with (folder / f"{name}.log").open("w") as log:
        status = subprocess.run([FORGE, *arguments], cwd=folder, stdout=log, stderr=log).returncode
    seconds = time.monotonic() - started
    shown = subprocess.run([FORGE, "ledger", name, "--json"], cwd=folder, check=True, capture_output=True, text=True)
    metrics = [json.loads(line)["metrics"] for line in shown.stdout.splitlines()]
    held_out = {int(m["eval/version"]): m["eval/reward/mean"] for m in metrics if "eval/reward/mean" in m}
    first, last = held_out[min(held_out)], held_out[max(held_out)]
    return {
        "seed": seed,
        "status": status,
        "reached": status == 0 and first <= START and last >= GOAL and seconds <= LIMIT_S,
        "seconds": round(seconds, 1),
        "first": first,
        "last": last,
        "held_out": {str(version): round(reward, 4) for version, reward in sorted(held_out.items())},
        "training": [round(m["reward/mean"], 4) for m in metrics],
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

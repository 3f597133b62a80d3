"""Does a tiny model learn to use the calculator, and is it the calculator that does it?

    python benchmarks/calculator_tool.py

Runs ``configs/calculator.yaml`` for each of three seeds through the real command, with the tool and without it (the
same configuration, model and warm start, and no ``environment``). Reward is the correctness of the final answer, on
held-out pairs and on each training batch. Recorded are also the calls of an episode, wall time and processor time of
the whole command, warm start included. Writes the figure of docs/environments.md. Exit status 1: a run missed the goal.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import provenance, write
from trained import train

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "calculator.yaml"
SEEDS = (0, 1, 2)
START, GOAL, LIMIT_S = 0.3, 0.8, 600.0


def run(folder: Path, seed: int, tool: bool) -> dict[str, Any]:
    """One whole run in ``folder``: its curve, its seconds, and whether it ended as it should."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    name = f"{'tool' if tool else 'no-tool'}-{seed}"
    done = train(folder, CONFIG, name, f"run.seed={seed}", *([] if tool else ["~environment"]))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seed": seed,
        "tool": tool,
        "status": done.status,
        "reached": done.status == 0 and done.first < START and (done.last > GOAL if tool else done.last < START),
        "in_time": done.seconds <= LIMIT_S,
        "seconds": round(done.seconds, 1),
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        **done.curves(),
        "calls": [round(m.get("environment/tool_calls", 0.0), 3) for m in done.metrics],
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Reward of training batches (thin) and of held-out pairs (marked), by training step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    for one in runs:
        colour, label = ("tab:blue", "with the calculator") if one["tool"] else ("tab:red", "without it")
        axes.plot(range(1, len(one["training"]) + 1), one["training"], color=colour, alpha=0.35, linewidth=0.8)
        versions = [int(version) for version in one["held_out"]]
        label = label if one["seed"] == SEEDS[0] else f"_{label}"  # one entry in the legend for all seeds
        axes.plot(versions, list(one["held_out"].values()), "o-", color=colour, markersize=4, label=label)
    axes.set(
        xlabel="training step", ylabel="share of right answers", ylim=(0, 1), title="Products of two-digit numbers"
    )
    axes.legend(loc="center right")
    figure.savefig(path, dpi=110)


def main() -> int:
    result: dict[str, Any] = {"benchmark": "calculator_tool", **provenance()}
    result["goal"] = {"first_below": START, "last_above": GOAL, "without_below": START, "seconds_at_most": LIMIT_S}
    with tempfile.TemporaryDirectory() as folder:
        result["runs"] = [run(Path(folder), seed, tool) for seed in SEEDS for tool in (True, False)]
    path = write("calculator_tool", result)
    images = path.parent if "OUT" in os.environ else ROOT / "docs" / "images"
    draw(result["runs"], images / "calculator-tool.png")
    return 0 if all(one["reached"] and one["in_time"] for one in result["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())

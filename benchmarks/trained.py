"""One whole run of the command ``forge``, and what its ledger says of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

FORGE = Path(sys.executable).with_name("forge")


class Trained(NamedTuple):
    """``status``: of the command. ``metrics``: of each committed step. ``held_out``: mean reward by version."""

    status: int
    seconds: float
    metrics: list[dict[str, float]]
    held_out: dict[int, float]

    @property
    def first(self) -> float:
        return self.held_out[min(self.held_out)]

    @property
    def last(self) -> float:
        return self.held_out[max(self.held_out)]

    def curves(self) -> dict[str, Any]:
        """What a result shows of the run."""
        return {
            "first": self.first,
            "last": self.last,
            "held_out": {str(version): round(reward, 4) for version, reward in sorted(self.held_out.items())},
            "training": [round(m["reward/mean"], 4) for m in self.metrics],
        }


def train(folder: Path, config: Path, name: str, *overrides: str) -> Trained:
    """``forge train config overrides`` in ``folder``, as the run ``name``; its output goes to ``<name>.log``."""
    started = time.monotonic()
    command = [FORGE, "train", str(config), f"run.id={name}", *overrides]
    with (folder / f"{name}.log").open("w") as log:
        status = subprocess.run(command, cwd=folder, stdout=log, stderr=log).returncode
    seconds = time.monotonic() - started
    shown = subprocess.run([FORGE, "ledger", name, "--json"], cwd=folder, check=True, capture_output=True, text=True)
    metrics = [json.loads(line)["metrics"] for line in shown.stdout.splitlines()]
    held_out = {int(m["eval/version"]): m["eval/reward/mean"] for m in metrics if "eval/reward/mean" in m}
    return Trained(status, seconds, metrics, held_out)

"""A tiny retraining: five digits to sort, a model of one layer, prompts that arrive as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from forge_core.data.sort_digits import prompts
from tests.runs.harness import TINY

NAME = "digits"
RUN: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if key != "run"},
    "run": {"seed": 3},
    "steps": 6,
    "rewards": {"functions": [{"path": "low_digits.py:low_digits"}]},
    "eval": {"prompts": 48, "interval": 0, "holdout": 0.3},
}
REWARD = '''"""The user's own reward."""


def low_digits(prompt, completion, metadata):
    """Share of the first three characters that are low digits."""
    return sum(c in "01234" for c in completion[:3]) / 3
'''
RUIN = {"training.entropy_coef": 10.0}  # rewards are nothing beside it: the policy forgets what it has learned


def write_project(folder: Path, **changes: Any) -> Path:
    """The run, the retraining and an empty ``incoming`` in ``folder``; returns the file of the retraining."""
    folder.mkdir(exist_ok=True)
    (folder / "incoming").mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    (folder / "low_digits.py").write_text(REWARD)
    settings = {"name": NAME, "config": "run.yaml", "data": "incoming/*.jsonl", **changes}
    (folder / "retrain.yaml").write_text(yaml.safe_dump(settings))
    return folder / "retrain.yaml"


def new_data(folder: Path, name: str, rows: int = 120) -> None:
    """A file of prompts that no other ``name`` has."""
    made = prompts(size=rows, seed=sum(map(ord, name)))
    (folder / "incoming" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in made))

"""``forge data``: what a run would make of its prompts. Reads all of them; loads no model."""

from __future__ import annotations

import argparse
import sys

from rich.table import Table

from flows.commands.common import loaded_config, show
from forge_core.config import ConfigError
from forge_core.data.curriculum import Curriculum, curriculum_of
from forge_core.data.duplicates import find_duplicates
from forge_core.data.prompts import load_prompts
from forge_core.runs.prompt_checks import trained_and_evaluated


def data(args: argparse.Namespace) -> int:
    """Counts of prompts on either side of the hold-out, levels of difficulty, and duplicates."""
    config = loaded_config(args)
    if config.dataset is None:
        raise ConfigError(["dataset: is not set: name the prompts, such as dataset.path=prompts.jsonl"])
    prompts = load_prompts(config.dataset, seed=config.run.seed)
    train, evaluated = trained_and_evaluated(config, prompts)
    table = Table("prompts", "rows", "distinct", "without an answer")
    for name, side in (("trained on", train), ("evaluated", evaluated)):
        distinct = len({prompt.prompt_id for prompt in side})
        table.add_row(name, str(len(side)), str(distinct), str(sum(prompt.target is None for prompt in side)))
    show(table)
    curriculum = curriculum_of(prompts, [prompt.row for prompt in train], config.dataset.curriculum)
    if curriculum is not None:
        show(_levels(curriculum, prompts.column(config.dataset.curriculum.column)))  # type: ignore[union-attr]
    for warning in find_duplicates(train, evaluated).lines():
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _levels(curriculum: Curriculum, values: list) -> Table:
    """Of each level, in the order of the visits: rows, and what its easiest and hardest row state."""
    table = Table("level", "rows", "from", "to")
    for number, rows in enumerate(curriculum.levels):
        table.add_row(str(number), str(len(rows)), str(values[rows[0]]), str(values[rows[-1]]))
    return table

"""The command that asks about runs in SQL."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from decimal import Decimal
from typing import Any

from rich.table import Table

from flows.commands.common import existing_store, show
from forge_core.config import ConfigError
from forge_core.visible import visible


def query(args: argparse.Namespace) -> int:
    """Print the answer to one SELECT about the runs."""
    from forge_core.query import RunTables

    with RunTables(existing_store(args, probe=False), args.run_ids) as tables:
        answer = tables.arrow(args.sql)
    if args.json:
        _refuse_equal_names(answer.column_names)
        for row in answer.to_pylist():
            print(json.dumps(_plain(row), default=str))
        return 0
    table = Table(*map(_cell, answer.column_names))
    for values in zip(*(column.to_pylist() for column in answer.columns), strict=True):
        table.add_row(*map(_cell, values))
    show(table)
    return 0


def _refuse_equal_names(names: list[str]) -> None:
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise ConfigError(
            f"--json: several columns of the answer are named {', '.join(repeated)}, and an object can have one: name "
            "them with AS, or leave --json out"
        )


def _plain(value: Any) -> Any:
    """``value`` as JSON has it: sums of whole numbers are whole, and what is no number is null."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    """A value as a cell: numbers short, text on one line."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return visible(value if isinstance(value, str) else str(value)).replace("\n", "\\n")

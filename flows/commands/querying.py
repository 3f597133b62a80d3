"""The command that asks about runs in SQL."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table

from flows.commands.common import existing_store, show
from forge_core.visible import visible


def query(args: argparse.Namespace) -> int:
    """Print the answer to one SELECT about the runs."""
    from forge_core.query import RunTables

    with RunTables(existing_store(args, probe=False), args.run_ids) as tables:
        answer = tables.arrow(args.sql)
    if args.json:
        for row in answer.to_pylist():
            print(json.dumps(row, default=str))
        return 0
    table = Table(*answer.column_names)
    for row in answer.to_pylist():
        table.add_row(*(_cell(value) for value in row.values()))
    show(table)
    return 0


def _cell(value: Any) -> str:
    """A value as a cell: numbers short, text on one line and without markup."""
    from rich.markup import escape

    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return escape(visible(value if isinstance(value, str) else str(value)).replace("\n", "\\n"))

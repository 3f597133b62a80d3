"""The command that asks about runs in SQL."""

from __future__ import annotations

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    query = commands.add("query", "answer a question in SQL about the tables of runs")
    query.add_argument("run_ids", nargs="*", metavar="RUN_ID", help="names of runs (default: all of the store)")
    query.add_argument("--sql", required=True, help="one SELECT (docs/queries.md has the tables and recipes)")
    query.add_argument("--json", action="store_true", help="one JSON object a row instead of a table")

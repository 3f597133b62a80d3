"""Commands that show what runs did."""

from __future__ import annotations

from pathlib import Path

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    report = commands.add("report", "write what runs did as one HTML page, and its pictures as PNG")
    report.add_argument("run_ids", nargs="+", metavar="RUN_ID", help="names of runs; several are compared")
    report.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: RUN_ID-report)")
    watch = commands.add("watch", "follow a run from its store alone, from any machine", run_id=True)
    watch.add_argument("--once", action="store_true", help="show what there is now, and end")

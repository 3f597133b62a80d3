"""Commands that show what runs did, from the store alone: report and watch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flows.commands.common import existing_store


def report(args: argparse.Namespace) -> int:
    """Write the page and its pictures; names on standard error what could not be read."""
    from forge_core.report import write_report

    store = existing_store(args, probe=False)
    written = write_report(store, args.run_ids, args.out or Path(f"{args.run_ids[0]}-report"))
    for run_id, problems in written.problems.items():
        for problem in problems:
            print(f"{run_id}: {problem}", file=sys.stderr)
    print(f"report: {written.page.absolute()}")
    print(f"{len(written.pictures)} pictures as PNG beside it")
    return 0


def watch(args: argparse.Namespace) -> int:
    """Show the state of a run until it is finished; Ctrl-C ends the watching, not the run."""
    from flows.watching import follow, show_once
    from forge_core.report.watching import Watched

    watched = Watched(existing_store(args, probe=False), args.run_id)
    show_once(watched) if args.once else follow(watched)
    return 0

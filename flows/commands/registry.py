"""Commands of the model registry: look, promote, roll back."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from flows.commands.common import committed_version, existing_store, show, stored_run
from flows.commands.models import evaluated_best
from forge_core.config import ConfigError
from forge_core.store import Ledger, Store, layout
from forge_core.weights.registry import ALIASES, PRODUCTION, Entry, Record, Registry, names, require_weights, shown


def models(args: argparse.Namespace) -> int:
    """A line for each model; or one model, or its history."""
    store = existing_store(args)
    if args.name is None:
        if args.history:
            raise ConfigError("--history: name a model: forge models NAME --history")
        return _list(store)
    registry = Registry(store, args.name)
    head = registry.head()
    if head is None:
        raise ConfigError(f"the registry of {store.uri} has no model {args.name!r}: it has {_known(store)}")
    return _history(registry) if args.history else _show(head)


def promote(args: argparse.Namespace) -> int:
    """Make a committed version the production model; refused for one that a gate rejected or nobody evaluated."""
    from forge_core.evaluation.provenance import version_record

    store, record, ledger = stored_run(args)
    best = args.best and evaluated_best(store, record.run_id)
    version = best if args.best else committed_version(ledger, record.run_id, args.version)
    evaluation = run_evaluation(store, ledger, record.run_id, version)
    wanted = version_record(store, record.run_id, version, evaluation=evaluation)
    require_weights(store, wanted, f"--version {version} cannot be promoted")
    registry = Registry(store, args.name)

    def check(head: Entry | None) -> None:
        if not args.force:
            _refuse_doubtful(registry, wanted)

    entry = registry.promote(wanted, "by hand, forced" if args.force else "by hand", check)
    done = "is the production model already" if entry is None else f"is the production model now (entry {entry['n']})"
    print(f"{args.name}: {shown(wanted)} {done}")
    return 0


def rollback(args: argparse.Namespace) -> int:
    """Put the production model before the present one in its place again."""
    store = existing_store(args)
    registry = Registry(store, args.name)
    now = registry.alias(PRODUCTION)
    entry = registry.rollback(f"instead of {shown(now)}" if now else "by hand")
    print(f"{args.name}: {shown(entry['subject'])} is the production model again (entry {entry['n']})")
    return 0


def run_evaluation(store: Store, ledger: Ledger, run_id: str, version: int) -> dict[str, Any] | None:
    """What the run's own evaluation of a version says; None when there is none."""
    from forge_core.evaluation.results import read_evaluation, summarise

    entry = ledger.entry(version - 1) if version else ledger.init()
    assert entry is not None
    prefix = layout.evaluation(run_id, version, entry["weights_digest"])
    if not store.published(prefix):
        return None
    reward = summarise(read_evaluation(store, prefix)).reward
    return {"prefix": prefix, "mean": reward.mean, "low": reward.low, "high": reward.high, "prompts": reward.items}


def _refuse_doubtful(registry: Registry, wanted: Record) -> None:
    """Raise ConfigError for a version that a gate rejected, or that was never evaluated."""
    for entry in registry.newest_first():
        if entry["action"] == "reject" and entry["subject"]["weights_digest"] == wanted["weights_digest"]:
            raise ConfigError(f"{shown(wanted)} was rejected: {entry['reason']}: --force promotes it all the same")
    if wanted["evaluation"] is None:
        raise ConfigError(
            f"{shown(wanted)} was not evaluated by its run: choose a version that was (forge ledger), or --best, or "
            "promote it unseen with --force"
        )


def _known(store: Store) -> str:
    return ", ".join(names(store)) or "none yet (forge promote NAME RUN_ID, or forge retrain)"


def _list(store: Store) -> int:
    table = Table("model", "production", "reward", "promoted", "candidate", "entries")
    for name in names(store):
        head = Registry(store, name).head()
        assert head is not None
        production, candidate = (head["aliases"][alias] for alias in ALIASES)
        promoted = production["promoted_at"] if production else ""
        table.add_row(name, _named(production), _reward(production), promoted, _named(candidate), str(head["n"] + 1))
    if table.rows:
        show(table)
    else:
        print("no models")
    return 0


def _show(head: Entry) -> int:
    for alias in ALIASES:
        record = head["aliases"][alias]
        print(f"{alias}: {_named(record) or 'none'}")
        for key, value in (record or {}).items():
            if key not in ("run_id", "version", "replaced") and value is not None:
                print(f"  {key}: {_plain(value)}")
    print(f"last change: {head['action']} {shown(head['subject'])}, {head['at']}: {head['reason']}")
    return 0


def _history(registry: Registry) -> int:
    table = Table("n", "at", "action", "what", "reward", "production then", "reason")
    for e in registry.entries():
        production = e["aliases"][PRODUCTION]
        subject, reward = e["subject"], _reward(e["subject"])
        table.add_row(str(e["n"]), e["at"], e["action"], _named(subject), reward, _named(production), e["reason"])
    show(table)
    return 0


def _named(record: Record | None) -> str:
    return shown(record) if record else ""


def _reward(record: Record | None) -> str:
    evaluation = record["evaluation"] if record else None
    return f"{evaluation['mean']:.4f}" if evaluation else ""


def _plain(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)

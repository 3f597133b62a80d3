"""What a run and a store can do without: retention, and what processes that ended left behind.

Invariants:
- What the registry's aliases stand for stays, and the production model before the present one, to which a rollback
  goes; so does the best evaluated version of a run.
- Episodes, rewards, reference log-probabilities, plans and the ledger are never touched. Of their prefixes only files
  go that no manifest names, once their batch is committed and ``gc.grace`` has passed.
- Advice is worth nothing once it is of the past: claims and candidates of committed steps, heartbeats of finished runs.
- All ages are measured on the store's own clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from forge_core.runs.record import RunRecord
from forge_core.runs.rescored import finished_batches
from forge_core.runs.versions import best_version, remember
from forge_core.store import Ledger, NotFound, Store, layout
from forge_core.store.checkpoints import prefix_number
from forge_core.store.deletion import Garbage, delete_objects
from forge_core.store.manifest import MANIFEST
from forge_core.store.retention import Collected, collect
from forge_core.weights.registry import PRODUCTION, Registry

LEFT_S = 86_400.0  # what a writer began a day ago it will not finish
SHARD_KINDS = ("episodes", "rewards", "reference")


def collect_garbage(store: Store, record: RunRecord, *, dry_run: bool = False) -> Collected:
    """Delete weights, checkpoints and abandoned attempts that nothing has reached for ``gc.grace`` seconds, and advice
    of the past; with ``dry_run`` only say what that is."""
    config, run_id = record.config, record.run_id
    best = best_version(store, run_id)
    of_best = () if best.version is None else (Ledger(store, run_id).weights_prefix(best.version),)
    collected = collect(
        store,
        run_id,
        staleness=config.max_staleness,
        keep_weights=config.weights.keep,
        keep_checkpoints=config.checkpoint.keep,
        grace_s=config.gc.grace,
        pinned=lambda: {*of_best, *registered_weights(store)},
        dry_run=dry_run,
    )
    advice = _delete(store, _past_advice(store, record), dry_run)
    if best.steps and not dry_run:
        remember(store, run_id, best)  # last, when there is room
    return Collected((*collected.garbage, *advice), collected.waiting)


def registered_weights(store: Store) -> set[str]:
    """Prefixes of the weights that the registry's aliases stand for, or that a rollback would put in their place."""
    found: set[str] = set()
    for name in store.folders("models"):
        registry = Registry(store, name)
        head = registry.head()
        aliases = head["aliases"].values() if head else ()
        records = [record for record in aliases if record is not None]
        production = head["aliases"][PRODUCTION] if head else None
        before = registry.before(production) if production else None
        found |= {record["weights"] for record in [*records, *([before] if before else [])]}
    return found


def collect_strays(store: Store, record: RunRecord, *, dry_run: bool = False) -> tuple[Garbage, ...]:
    """Delete files of shards of committed batches that no manifest names: of a writer that was killed, or that lost.
    It lists all shards of the run."""
    head, now, grace_s = Ledger(store, record.run_id).head(), store.now(), record.config.gc.grace
    strays = []
    for prefix, keys in _shards(store, record.run_id, head).items():
        unnamed = _unnamed(store, prefix, keys)
        strays.append(Garbage(prefix, {k: size for k, size in unnamed.items() if _age(store, k, now) >= grace_s}))
    return _delete(store, strays, dry_run)


def collect_leftovers(store: Store, *, dry_run: bool = False) -> tuple[Garbage, ...]:
    """Delete what belongs to no run: uploads that nobody finished, and probes of processes that were killed. Both are
    left alone for a day, in which their writers may still live."""
    now = store.now()
    uploads = [upload for upload in store.unfinished() if now - upload.since >= LEFT_S]
    if not dry_run:
        for upload in uploads:
            store.discard(upload)
    unfinished = [Garbage(f"{upload.path} (unfinished)", {upload.path: upload.size}) for upload in uploads]
    probes = {key: size for key, size in store.sizes("probe").items() if _age(store, key, now) >= LEFT_S}
    return (*unfinished, *_delete(store, [Garbage("probe/", probes)], dry_run))


def _past_advice(store: Store, record: RunRecord) -> Iterator[Garbage]:
    run, head = layout.run(record.run_id), Ledger(store, record.run_id).head()
    finished = finished_batches(store, record) >= record.config.steps
    for kind, first_needed in (("claims", head), ("candidates", head + 1)):
        for name in store.folders(f"{run}{kind}"):
            evaluated = name.startswith("evaluation-")  # as long as the window lasts
            number = int(name.removeprefix("evaluation-").partition("-")[0])
            if finished or number < (head - record.config.max_staleness if evaluated else first_needed):
                yield Garbage(f"{run}{kind}/{name}/", store.sizes(f"{run}{kind}/{name}"))
    if finished:
        yield Garbage(f"{run}workers/", store.sizes(f"{run}workers"))


def _shards(store: Store, run_id: str, head: int) -> dict[str, dict[str, int]]:
    """Prefix and keys of each shard of the committed batches."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for kind in SHARD_KINDS:
        for key, size in store.sizes(f"{layout.run(run_id)}{kind}").items():
            prefix = str(PurePosixPath(key).parent) + "/"
            if prefix_number(str(PurePosixPath(prefix).parent)) < head:
                found[prefix][key] = size
    return found


def _unnamed(store: Store, prefix: str, keys: dict[str, int]) -> dict[str, int]:
    """Those of ``keys`` that the manifest does not name: a shard is one file with its manifest."""
    if prefix + MANIFEST in keys and len(keys) <= 2:
        return {}
    try:
        manifest = store.open_published(prefix).manifest
    except NotFound:
        return keys
    named = {prefix + MANIFEST, *(file.key for file in manifest.files)}
    return {key: size for key, size in keys.items() if key not in named}


def _age(store: Store, key: str, now: float) -> float:
    try:
        return now - store.written_at(key)
    except NotFound:
        return 0.0


def _delete(store: Store, found: Iterable[Garbage], dry_run: bool) -> tuple[Garbage, ...]:
    garbage = tuple(item for item in found if item.keys)
    if not dry_run:
        for item in garbage:
            delete_objects(store, item.keys)
    return garbage

"""Which files of the store make up a table of a run.

Invariants:
- Only published objects count: a file that no manifest names (of a writer that was killed, or that lost) is left out.
- Of several tries of a training step only the one counts that the ledger names.
- A table costs one listing, however many shards it has; a manifest is read only where a folder holds more than one
  file, which a lost race leaves.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from forge_core.store import Ledger, NotFound, Store, layout
from forge_core.store.manifest import MANIFEST
from forge_core.store.store import READERS

Sizes = dict[str, int]


def shard_files(store: Store, run_id: str, kind: str) -> Sizes:
    """Keys and sizes of the Parquet files of ``kind`` (episodes, rewards or reference), in plan order."""
    return _published(store, _folders(store, f"{layout.run(run_id)}{kind}"))


def training_files(store: Store, run_id: str) -> Sizes:
    """Those of the ``training`` table: of committed steps."""
    ledger, folders = Ledger(store, run_id), _folders(store, f"{layout.run(run_id)}training")
    tries: dict[int, list[str]] = defaultdict(list)
    for prefix in folders:
        tries[_batch(prefix)].append(prefix)
    head = ledger.head()
    named = {
        batch: ps[0] if len(ps) == 1 else ledger.required(batch)["training"]
        for batch, ps in tries.items()
        if batch < head
    }
    return _published(store, {prefix: folders[prefix] for prefix in named.values()})


def metric_files(store: Store, run_id: str) -> Sizes:
    """Those of the ``metrics`` table: a file for each committed step."""
    return {key: size for key, size in store.sizes(layout.metrics_folder(run_id)).items() if key.endswith(".parquet")}


def _batch(prefix: str) -> int:
    return int(prefix.rstrip("/").rpartition("/")[2].partition("-")[0])


def _folders(store: Store, prefix: str) -> dict[str, Sizes]:
    """The keys of each folder that holds files."""
    found: dict[str, Sizes] = defaultdict(dict)
    for key, size in store.sizes(prefix).items():
        found[key.rpartition("/")[0] + "/"][key] = size
    return found


def _published(store: Store, folders: dict[str, Sizes]) -> Sizes:
    plain: dict[str, Sizes] = {}
    unsure: list[str] = []
    for prefix, keys in folders.items():
        files = {key: size for key, size in keys.items() if key.endswith(".parquet")}
        if prefix + MANIFEST in keys:
            plain[prefix] = files
            if len(files) != 1:
                unsure.append(prefix)
    with ThreadPoolExecutor(READERS) as pool:
        plain |= dict(zip(unsure, pool.map(lambda prefix: _named(store, prefix), unsure), strict=True))
    return {key: size for prefix in sorted(plain) for key, size in plain[prefix].items()}


def _named(store: Store, prefix: str) -> Sizes:
    try:
        files = store.open_published(prefix).manifest.files
    except NotFound:  # deleted since it was listed
        return {}
    return {file.key: file.size for file in files if file.key.endswith(".parquet")}

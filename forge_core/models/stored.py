"""Models that lie in the store: ``run://RUN_ID/VERSION`` is a version of a run, under any name a model can have.

Invariants:
- A version is found through the ledger of its run, and its weights are those that the ledger committed.
- A reference is pinned: it stands for the same weights for ever. Who has found it once has it as long as its process
  lives, whatever the retention of that run deletes meanwhile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forge_core.config.any_config import AnyConfig
from forge_core.config.loader import store_uri
from forge_core.models.errors import ModelError
from forge_core.models.resolve import check_model_folder, resolve_model, resolve_sizes
from forge_core.store import Ledger, Store, open_store
from forge_core.weights.host_cache import keep_published, kept

SCHEME = "run://"


@dataclass(frozen=True)
class RunVersion:
    run_id: str
    version: int

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.version}"


def parse_run_version(model: str) -> RunVersion | None:
    """The version that ``model`` names; None for a model of another kind. Raises ModelError for half a name."""
    if not model.startswith(SCHEME):
        return None
    match = re.fullmatch(r"run://([A-Za-z0-9][A-Za-z0-9._-]{0,99})/(\d+)", model)
    if match is None:
        raise ModelError(f"model {model!r}: write run://RUN_ID/VERSION, such as run://first/20")
    return RunVersion(match[1], int(match[2]))


def configured_model(config: AnyConfig) -> Path:
    """The checked local folder of the pretrained model that ``config`` names. Raises ModelError, StoreError."""
    assert isinstance(config.model, str)
    stored = parse_run_version(config.model)
    return stored_model(open_store(store_uri(None, config)), stored) if stored else resolve_model(config.model)


def configured_sizes(config: AnyConfig) -> Path:
    """A local folder with the ``config.json`` of that model: no weights are fetched from the hub for it. Raises
    ModelError, StoreError."""
    assert isinstance(config.model, str)
    return configured_model(config) if parse_run_version(config.model) else resolve_sizes(config.model)


def stored_model(store: Store, wanted: RunVersion) -> Path:
    """A local folder with the weights of a version of a run, for the life of this process. Raises ModelError when it is
    not committed, or when its weights were deleted before this process first asked for them."""
    prefix = _committed_prefix(store, wanted)
    if not store.published(prefix) and (folder := kept(store, prefix)):
        return check_model_folder(folder)
    return check_model_folder(keep_published(store, stored_prefix(store, wanted)))


def stored_prefix(store: Store, wanted: RunVersion) -> str:
    """Where the weights of a version are. Raises ModelError when it is not committed or its weights were deleted."""
    prefix = _committed_prefix(store, wanted)
    if not store.published(prefix):
        ledger = Ledger(store, wanted.run_id)
        left = [str(v) for v in range(ledger.head() + 1) if store.published(ledger.weights_prefix(v))]
        raise ModelError(
            f"model {wanted}: its weights were deleted; run {wanted.run_id!r} still has those of the versions "
            f"{', '.join(left) or '(none)'}"
        )
    return prefix


def _committed_prefix(store: Store, wanted: RunVersion) -> str:
    ledger = Ledger(store, wanted.run_id)
    head = ledger.head()
    if not 0 <= wanted.version <= head:
        has = f"has the versions 0 to {head}" if head >= 0 else "has no version"
        raise ModelError(f"model {wanted}: run {wanted.run_id!r} in {store.uri} {has}")
    return ledger.weights_prefix(wanted.version)

"""What can be evaluated: a version of a run, the production or candidate model of the registry, or a model folder.

Invariant: a policy is pinned when it is found: its weights are named by the digest of their content, which is the same
for equal files wherever they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_core.evaluation.suite import policy_digest
from forge_core.models.errors import ModelError
from forge_core.models.resolve import MODEL_FILES, resolve_model
from forge_core.models.stored import RunVersion, parse_run_version, stored_model, stored_prefix
from forge_core.store import File, Ledger, Store, layout
from forge_core.store.digests import data_digest
from forge_core.weights.registry import ALIASES, PRODUCTION, Record, Registry, require_weights

MODEL = "model://"


@dataclass(frozen=True)
class Policy:
    """``name`` is for people; ``version``: the run's version that has these weights, where one has; else ``path``."""

    name: str
    digest: str
    version: RunVersion | None = None
    path: Path | None = None

    def folder(self, store: Store) -> Path:
        """A local folder with the weights. Raises ModelError, StoreError."""
        if self.path is not None:
            return self.path
        assert self.version is not None
        return stored_model(store, self.version)


def find_policy(store: Store, name: str) -> Policy:
    """The policy that ``name`` means now: ``run://RUN_ID/VERSION`` (or ``run://RUN_ID``: the newest),
    ``model://NAME`` (or ``model://NAME/candidate``), a folder or a hub id. Raises ModelError, StoreError."""
    if name.startswith(MODEL):
        return _registered(store, name)
    if name.startswith("run://") and "/" not in name.removeprefix("run://"):
        name = f"{name}/{max(0, Ledger(store, name.removeprefix('run://')).head())}"
    version = parse_run_version(name)
    if version is not None:
        return version_policy(store, str(version), version)
    if "/" not in name and not Path(name).exists() and store.exists(layout.run_json(name)):
        raise ModelError(f"model {name!r}: the store has a run of this name: write run://{name} for its newest version")
    return folder_policy(name, resolve_model(name))


def recorded_policy(store: Store, name: str, record: Record) -> Policy:
    """The policy of a registry record. Raises RegistryError when its weights are gone."""
    require_weights(store, record, f"{name} cannot be evaluated")
    return version_policy(store, name, RunVersion(record["run_id"], record["version"]))


def version_policy(store: Store, name: str, version: RunVersion) -> Policy:
    """A version of a run. Raises ModelError when it is not committed or its weights were deleted."""
    manifest = store.open_published(stored_prefix(store, version)).manifest
    return Policy(name, policy_digest(manifest.files), version)


def folder_policy(name: str, folder: Path) -> Policy:
    """A model folder, known by the digest of its files as a run would publish them."""
    files = [File(f.name, f.name, 0, data_digest(f)[0]) for f in sorted(folder.iterdir()) if f.suffix in MODEL_FILES]
    return Policy(name, policy_digest(files), path=folder)


def _registered(store: Store, name: str) -> Policy:
    model, _, alias = name.removeprefix(MODEL).partition("/")
    alias = alias or PRODUCTION
    if alias not in ALIASES:
        raise ModelError(f"model {name!r}: write model://NAME, model://NAME/production or model://NAME/candidate")
    record = Registry(store, model).alias(alias)
    if record is None:
        raise ModelError(
            f"model {name!r}: {model} has no {alias} model in {store.uri}: forge models lists what there is"
        )
    return recorded_policy(store, name, record)

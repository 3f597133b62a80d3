"""Checkpoints in the store: the trainer's state after a committed step.

A checkpoint belongs to the chain when it is complete and its ``request`` is the digest of the committed entry that it
follows: the state of an attempt whose step was committed by somebody else is never resumed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forge_core.store import layout
from forge_core.store.ledger import Ledger, entry_digest
from forge_core.store.manifest import MANIFEST, File, Manifest
from forge_core.store.store import Store


@dataclass(frozen=True, order=True)
class Checkpoint:
    """The complete checkpoint after training step ``batch``."""

    batch: int
    prefix: str


def publish_checkpoint(
    store: Store, run_id: str, entry: Mapping[str, Any], attempt: str, files: Iterable[File]
) -> Manifest:
    """Publish the state that follows the committed ``entry``; its ``files`` were uploaded, by one rank or several."""
    prefix = layout.checkpoint(run_id, entry["batch"], attempt)
    return store.publish_uploaded(prefix, files, request=entry_digest(entry))


def complete_checkpoints(store: Store, run_id: str) -> list[Checkpoint]:
    """The complete checkpoints of the chain, oldest first, one for a batch."""
    keys = store.list(f"{layout.run(run_id)}checkpoints")
    prefixes = [key.removesuffix(MANIFEST) for key in keys if key.endswith(f"/{MANIFEST}")]
    ledger = Ledger(store, run_id)
    chain = (Checkpoint(prefix_number(prefix), prefix) for prefix in prefixes if _of_chain(store, ledger, prefix))
    return sorted({checkpoint.batch: checkpoint for checkpoint in chain}.values())


def prefix_number(prefix: str) -> int:
    """The batch or version of a prefix ``.../<number>-<attempt>/``."""
    return int(prefix.rstrip("/").rpartition("/")[2].partition("-")[0])


def _of_chain(store: Store, ledger: Ledger, prefix: str) -> bool:
    entry = ledger.entry(prefix_number(prefix))
    return entry is not None and store.open_published(prefix).manifest.request == entry_digest(entry)

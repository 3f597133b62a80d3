"""Stored episodes under another run: what ``forge rescore`` and ``forge retrain-from`` work on.

Invariants:
- The parent is only read. Its plans, episodes and (for training) rewards are published again below the new run, with
  the new run in their ids and the objects they were copied from in their provenance: so a run is whole by itself,
  for SQL and after its parent was deleted.
- Contents, seeds, policy versions and version spans stay what they were: they speak of the run that sampled.
- What exists is not copied again, and the ``request`` of a copy is known before the work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forge_core.data_model import REWARDS, SCHEMA_VERSION, from_parquet
from forge_core.runs.consumption import StepData
from forge_core.runs.episodes import EPISODES_FILE, REFERENCE_FILE, REWARDS_FILE
from forge_core.runs.record import RunRecord, load_run
from forge_core.runs.refilling import accepted_groups
from forge_core.runs.stages import ShardRef, reference_request, reference_shard
from forge_core.store import CorruptObject, Ledger, Manifest, Store, digest, layout
from forge_core.store.plans import put_plan

if TYPE_CHECKING:
    from forge_core.runs.context import RunContext

Place = Callable[[str, int, int, int], str]  # a shard's prefix, of layout


class StoredBatches:
    """The batches of a run that can be used again, counted from 0: those that are complete."""

    def __init__(self, store: Store, record: RunRecord) -> None:
        self._store, self._record = store, record
        self._ledger = Ledger(store, record.run_id)

    def count(self) -> int:
        if self._record.flow == "rescore":
            return len(self._store.list(layout.rescored_folder(self._record.run_id)))
        batch = max(0, self._ledger.head())
        if self._record.parent or self._record.config.filters.dynamic_sampling:  # what is open may lack a round
            return batch
        while self._complete(batch):
            batch += 1
        return batch

    def plans(self, batch: int) -> list[dict[str, Any]]:
        """The plans of all rounds of a batch, round 0 first."""
        run_id = self._record.run_id
        if self._record.flow == "rescore":
            entry: dict[str, Any] | None = self._store.read_json(layout.rescored(run_id, batch))
        else:
            entry = self._ledger.entry(batch)
        keys = entry["plans"] if entry else [layout.plan(run_id, batch, 0)]
        return [self._store.read_json(key) for key in keys]

    def _complete(self, batch: int) -> bool:
        run_id = self._record.run_id
        if not self._store.exists(layout.plan(run_id, batch, 0)):
            return False
        shards = range(len(self._store.read_json(layout.plan(run_id, batch, 0))["shards"]))
        return all(self._store.published(layout.rewards(run_id, batch, 0, shard)) for shard in shards)


@dataclass(frozen=True)
class Ids:
    """Beginnings of the ids of a batch's episodes: in the parent, and in the new run."""

    theirs: str
    ours: str

    def original(self, episode_id: str) -> str:
        """The parent's id of one of our episodes."""
        return self.theirs + episode_id.removeprefix(self.ours)

    def renamed(self, data: bytes, columns: Collection[str], name: str) -> bytes:
        """The Parquet table ``data`` with other ids in ``columns``. Raises CorruptObject for ids of another batch."""
        table = pq.read_table(pa.BufferReader(data))
        for column in columns:
            values = table[column]
            if not pc.all(pc.starts_with(values, self.theirs)).as_py():
                raise CorruptObject(f"{name}: its {column} must begin with {self.theirs}: restore the object")
            new = pc.utf8_replace_slice(values, 0, len(self.theirs), self.ours)
            table = table.set_column(table.schema.get_field_index(column), table.schema.field(column), new)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        return sink.getvalue().to_pybytes()


@dataclass(frozen=True)
class Copier:
    """Publishes the objects of the parent's batch ``theirs`` again, as batch ``batch`` of the run ``ctx``."""

    ctx: RunContext
    batch: int

    @property
    def parent(self) -> str:
        assert self.ctx.record.parent is not None
        return self.ctx.record.parent.run_id

    @property
    def theirs(self) -> int:
        assert self.ctx.record.parent is not None
        return self.ctx.record.parent.first_batch + self.batch

    @property
    def ids(self) -> Ids:
        return Ids(f"{self.parent}/{self.theirs:08d}/", f"{self.ctx.run_id}/{self.batch:08d}/")

    def plans(self) -> list[dict[str, Any]]:
        """The batch's plans, stored below the new run."""
        store, parent = self.ctx.store, load_run(self.ctx.store, self.parent)
        plans = [{**plan, "batch": self.batch} for plan in StoredBatches(store, parent).plans(self.theirs)]
        return [put_plan(store, self.ctx.run_id, self.batch, plan["round"], plan) for plan in plans]

    def source(self, place: Place, round: int, shard: int) -> str:
        return place(self.parent, self.theirs, round, shard)

    def rewards(self, round: int, shard: int) -> dict[str, float | None]:
        """The parent's rewards of one shard, by its own episode ids."""
        prefix = self.source(layout.rewards, round, shard)
        rows = from_parquet(self.ctx.store.open_published(prefix).read(REWARDS_FILE), REWARDS, prefix)
        return {row["episode_id"]: row["reward"] for row in rows}

    def copy(self, place: Place, round: int, shard: int, file: str, columns: Collection[str], request: str) -> ShardRef:
        """Publish one object again."""
        store, source = self.ctx.store, self.source(place, round, shard)
        prefix = place(self.ctx.run_id, self.batch, round, shard)
        if not store.published(prefix):
            original = store.open_published(source)
            files = {file: self.ids.renamed(original.read(file), columns, source)}
            self.ctx.shards.keep(store.publish(prefix, files, request=request, provenance=_copied(original.manifest)))
        content = self.ctx.shards.open_published(prefix, request=request).manifest.content
        return ShardRef(self.batch, shard, prefix, content, round)


def _copied(manifest: Manifest) -> dict[str, Any]:
    """The provenance of a copy: nothing was worked for it; the rest is the original's."""
    made_of = {"prefix": manifest.prefix, "content": manifest.content, "seconds": manifest.provenance.get("seconds")}
    return {**manifest.provenance, "seconds": 0.0, "waited_seconds": 0.0, "copied_from": made_of}


def reuse_batch(ctx: RunContext, batch: int) -> list[ShardRef]:
    """Make a batch of the parent this run's, with its rewards if this run trains; its episode shards, of all rounds."""
    copier, found = Copier(ctx, batch), []
    for plan in copier.plans():
        for shard in range(len(plan["shards"])):
            ctx.stop.check()
            found.append(_reuse_shard(copier, plan["round"], shard))
    return found


def _reuse_shard(copier: Copier, round: int, shard: int) -> ShardRef:
    ctx, store = copier.ctx, copier.ctx.store
    request = store.open_published(copier.source(layout.episodes, round, shard)).manifest.request
    ids = ("episode_id", "group_id")
    episodes = copier.copy(layout.episodes, round, shard, EPISODES_FILE, ids, request)
    if ctx.record.flow == "retrain-from":
        graded = store.open_published(copier.source(layout.rewards, round, shard)).manifest.request
        request = digest({"stage": "rewards", "schema": SCHEMA_VERSION, "copied": graded, "episodes": episodes.content})
        copier.copy(layout.rewards, round, shard, REWARDS_FILE, ("episode_id",), request)
    return episodes


def reuse_reference(ctx: RunContext, batch: int, shards: list[ShardRef]) -> list[ShardRef]:
    """The reference log-probabilities of a batch: the parent's where they are of the same model, else computed."""
    copier, accepted = Copier(ctx, batch), None
    if ctx.config.filters.dynamic_sampling:
        accepted = accepted_groups(ctx, ctx.rounds(batch))
    return [
        _copied_reference(copier, episodes, accepted) or reference_shard(ctx, episodes, accepted) for episodes in shards
    ]


def _copied_reference(copier: Copier, episodes: ShardRef, accepted: list[str] | None) -> ShardRef | None:
    ctx, store, place = copier.ctx, copier.ctx.store, (episodes.round, episodes.shard)
    theirs = copier.source(layout.reference, *place)
    if not store.published(theirs):
        return None
    content = store.open_published(copier.source(layout.episodes, *place)).manifest.content
    groups = accepted and [copier.ids.original(f"{group}/").removesuffix("/") for group in accepted]
    if store.open_published(theirs).manifest.request != reference_request(ctx, content, groups):
        return None
    request = reference_request(ctx, episodes.content, accepted)
    return copier.copy(layout.reference, *place, REFERENCE_FILE, ("episode_id",), request)


def off_policy(ctx: RunContext, data: StepData) -> dict[str, Any]:
    """What a ledger entry says of episodes that another run's policies sampled; nothing for a run that samples."""
    parent = ctx.record.parent
    if parent is None:
        return {}
    versions = [span.version for e in data.generated for span in e.version_spans]
    sampled = {"run_id": parent.sampler, "versions": [min(versions), max(versions)] if versions else []}
    return {"off_policy": True, "sampled_by": sampled}

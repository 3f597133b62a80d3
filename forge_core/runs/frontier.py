"""What a run's stored objects say can be done now: the columns of the DAG, read from the store alone.

Invariants:
- Batch ``b`` is open from the commit of step ``b - S - 1`` to its own: the window of ``flows/grpo.py``, seen from
  another process. A shard is due when what it is made of is published and it is not.
- Everything asked for is an exact key; objects are immutable, so what was once found published is not asked again.
- Only generators plan (they have the tokenizer); all others read plans.
- What another process of the same role is known to hold is not asked for, and each process begins a batch at a shard of
  its own: the requests of claims grow with the shards, not with shards times processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from forge_core.runs.candidates import newest_candidate
from forge_core.runs.claims import Claims
from forge_core.runs.context import RunContext
from forge_core.runs.refilling import is_full, plan_refill
from forge_core.runs.stages import ShardRef, sampling_version
from forge_core.store import layout
from forge_core.store.manifest import MANIFEST


@dataclass(frozen=True)
class Rollout:
    """A shard to sample; ``version``: the oldest that may."""

    batch: int
    round: int
    shard: int
    version: int

    def __str__(self) -> str:
        return f"samples batch {self.batch}, shard {self.shard}"

    def claims(self, run_id: str) -> str:
        return layout.claims(run_id, self.batch, self.round, self.shard)


@dataclass(frozen=True)
class Evaluation:
    """A version to evaluate; ``weights`` is the digest of its content."""

    version: int
    weights: str

    def __str__(self) -> str:
        return f"evaluates version {self.version}"

    def claims(self, run_id: str) -> str:
        return layout.evaluation_claims(run_id, self.version, self.weights)


@dataclass(frozen=True)
class Scoring:
    """A sampled shard to grade."""

    episodes: ShardRef

    def __str__(self) -> str:
        return f"grades batch {self.episodes.batch}, shard {self.episodes.shard}"

    def claims(self, run_id: str) -> str:
        return layout.rewards_claims(run_id, self.episodes.batch, self.episodes.round, self.episodes.shard)


@dataclass(frozen=True)
class Referencing:
    """One shard that lacks reference log-probabilities, or all of a batch that may be refilled (a list)."""

    batch: int
    episodes: ShardRef | list[ShardRef]

    def __str__(self) -> str:
        return f"computes reference log-probabilities of batch {self.batch}"

    def claims(self, run_id: str) -> str:
        if isinstance(self.episodes, list):  # it has one claim, whichever of its shards are still missing
            return layout.reference_claims(run_id, self.batch, 0, 0)
        return layout.reference_claims(run_id, self.batch, self.episodes.round, self.episodes.shard)


class Stage(NamedTuple):
    """A stage after sampling: where its object of a shard lies, and the claims of that shard."""

    published: Callable[[str, int, int, int], str]
    claims: Callable[[str, int, int, int], str]


REWARDS = Stage(layout.rewards, layout.rewards_claims)
REFERENCE = Stage(layout.reference, layout.reference_claims)


@dataclass(frozen=True)
class Step:
    """A training step to take."""

    batch: int

    def __str__(self) -> str:
        return f"trains on batch {self.batch}"


class Frontier:
    """The work that is due in a run, as this process sees it now."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._there: set[str] = set()  # keys
        self._full: set[int] = set()  # batches that need no further round

    def finished(self) -> bool:
        return self._ctx.ledger.head() >= self._ctx.config.steps

    def open_batches(self) -> range:
        """The batches that may be worked on and are not trained yet; none before version 0."""
        return self._open_at(self._ctx.ledger.head())

    def _open_at(self, head: int) -> range:
        config = self._ctx.config
        return range(0) if head < 0 else range(head, min(head + config.max_staleness + 1, config.steps))

    def sampling(self, claims: Claims | None = None) -> Iterator[Rollout | Evaluation]:
        """What generators can do, the oldest version first: with ``rollout.version: oldest`` an engine that took a
        newer version could not go back. ``claims``: of the generator that asks; what others hold is left out."""
        head = self._ctx.ledger.head()
        pinned, evaluations = self._ctx.config.rollout.version == "oldest", list(self._evaluations(head))
        newest = min([head, *(e.version for e in evaluations)])  # that engines may move to
        yield from [] if pinned else evaluations
        for batch in self._open_at(head):
            version = sampling_version(self._ctx, batch, newest)
            yield from [e for e in evaluations if pinned and e.version < version]
            evaluations = [e for e in evaluations if not pinned or e.version >= version]
            if version > newest:
                return  # until the evaluation is there, this batch waits, and those after it
            yield from self._rollouts(batch, version, claims)
        yield from evaluations if pinned else []

    def waiting_for(self) -> set[str]:
        """The roles that have something to do. Plans nothing."""
        head = self._ctx.ledger.head()
        if head < 0:
            return {"trainer"}
        if self.step() is not None:  # which may wait for an evaluation before it commits
            return {"trainer"} | ({"generator"} if any(True for _ in self._evaluations(head)) else set())
        unplanned = any(not self._stored_plans(batch) or self._unsampled(batch) for batch in self._open_at(head))
        roles = {
            "generator": unplanned or any(True for _ in self._evaluations(head)),
            "scorer": any(True for _ in self.unscored()),
            "reference": any(True for _ in self.unreferenced()),
        }
        return {role for role, works in roles.items() if works}

    def unscored(self, claims: Claims | None = None) -> Iterator[Scoring]:
        """Sampled shards without rewards. ``claims``: of the scorer that asks; what others hold is left out."""
        return (Scoring(ref) for batch in self.open_batches() for ref in self._without(batch, REWARDS, claims))

    def unreferenced(self, claims: Claims | None = None) -> Iterator[Referencing]:
        """Sampled shards that lack reference log-probabilities. A batch that may be refilled is due as a whole, when it
        is full: the reference computes the accepted groups only. ``claims``: of the reference worker that asks."""
        if self._ctx.config.grpo.beta == 0:
            return
        for batch in self.open_batches():
            if not self._ctx.config.filters.dynamic_sampling:
                yield from (Referencing(batch, ref) for ref in self._without(batch, REFERENCE, claims))
            elif self.full(batch) and (missing := list(self._without(batch, REFERENCE))):
                yield Referencing(batch, missing)

    def step(self) -> Step | None:
        """The next training step, when everything that it consumes is there."""
        head = self._ctx.ledger.head()
        return Step(head) if 0 <= head < self._ctx.config.steps and self._trainable(head) else None

    def _trainable(self, batch: int) -> bool:
        ctx, stages = self._ctx, [layout.episodes, layout.rewards]
        if not self._stored_plans(batch) or not self.full(batch):
            return False
        stages += [layout.reference] if ctx.config.grpo.beta > 0 else []
        keys = (key(*shard) for key in stages for shard in self._shards(batch))
        return all(map(self._is_published, keys))

    def full(self, batch: int) -> bool:
        """Whether ``batch`` has all of its rounds, sampled and scored."""
        if batch not in self._full:
            plans = self._stored_plans(batch)
            if not plans or not self._scored(batch) or not is_full(self._ctx, plans):
                return False
            self._full.add(batch)
        return True

    def _scored(self, batch: int) -> bool:
        return all(self._is_published(layout.rewards(*shard)) for shard in self._shards(batch))

    def _unsampled(self, batch: int) -> bool:
        return not all(self._is_published(layout.episodes(*shard)) for shard in self._shards(batch))

    def _rollouts(self, batch: int, version: int, claims: Claims | None) -> Iterator[Rollout]:
        ctx = self._ctx
        plans = ctx.rounds(batch)
        if ctx.config.filters.dynamic_sampling and self._scored(batch) and not self.full(batch):
            plans.append(plan_refill(ctx, batch, plans))
        for plan in plans:
            for shard in _in_turn(len(plan["shards"]), claims):
                work = Rollout(batch, plan["round"], shard, version)
                if claims is not None and claims.held(work.claims(ctx.run_id)):
                    continue
                if not self._is_published(layout.episodes(ctx.run_id, batch, plan["round"], shard)):
                    yield work

    def _evaluations(self, head: int) -> Iterator[Evaluation]:
        """The versions up to the newest (``head``) that are to be evaluated, and the candidate of the last one."""
        ctx = self._ctx
        if ctx.config.eval.prompts == 0 or head < 0 or head >= ctx.config.steps:
            return
        known = ctx.evaluations
        due = [Evaluation(version, known.weights(version)) for version in known.unrecorded(head)]
        if head + 1 == ctx.config.steps and (found := newest_candidate(ctx, head + 1)):
            due.append(Evaluation(head + 1, found["weights_digest"]))
        yield from (one for one in due if not known.is_there(one.version, one.weights))

    def _without(self, batch: int, stage: Stage, claims: Claims | None = None) -> Iterator[ShardRef]:
        """The sampled shards of ``batch`` that have no object of ``stage`` and that no other holds."""
        shards = self._shards(batch)
        for shard in (shards[n] for n in _in_turn(len(shards), claims)):
            if claims is not None and claims.held(stage.claims(*shard)):
                continue
            prefix, (_, _, round, number) = layout.episodes(*shard), shard
            if self._is_published(prefix) and not self._is_published(stage.published(*shard)):
                manifest = self._ctx.shards.open_published(prefix).manifest
                yield ShardRef(batch, number, prefix, manifest.content, round)

    def _shards(self, batch: int) -> list[tuple[str, int, int, int]]:
        """Run, batch, round and shard of everything planned for ``batch`` so far."""
        plans = self._stored_plans(batch)
        return [(self._ctx.run_id, batch, p["round"], s) for p in plans for s in range(len(p["shards"]))]

    def _stored_plans(self, batch: int) -> list[dict[str, Any]]:
        return self._ctx.rounds(batch) if self._exists(layout.plan(self._ctx.run_id, batch, 0)) else []

    def _is_published(self, prefix: str) -> bool:
        return self._exists(prefix + MANIFEST)

    def _exists(self, key: str) -> bool:
        if key not in self._there and self._ctx.store.exists(key):
            self._there.add(key)
        return key in self._there


def _in_turn(shards: int, claims: Claims | None) -> Iterator[int]:
    """All shards, beginning with one that this process's name decides: all would race for the first one otherwise."""
    first = claims.turn if claims is not None else 0
    return ((first + n) % shards for n in range(shards))

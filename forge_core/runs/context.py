"""Everything one process holds of a run: its store, its record and, loaded when first needed, its engines.

Invariants:
- An engine is loaded once per process and owns one thread; tasks find it through the run's reference, never through
  arguments.
- Engines refer to weights by version only; a version is found through the ledger. The one exception is the candidate
  that the trainer has published and is about to commit: it may be evaluated before it exists.
- On a CPU, engines that work at the same time divide the cores.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.config.gpu_gate import check_leased, placement_warnings
from forge_core.data.curriculum import curriculum_of
from forge_core.data.cursor import Cursor
from forge_core.data.prompts import Prompt, PromptSet, load_prompts, render, split_holdout
from forge_core.devices import Placement, alone, place, sampling_nothing, visible_gpus
from forge_core.environments.resolve import build_play, tools_of
from forge_core.evaluation.suite import heldout_prompts, policy_digest
from forge_core.generation.base import Generator
from forge_core.gpu_leases import Choose, Lease, lease
from forge_core.models.scratch import check_encodable
from forge_core.observability.best_effort import BestEffort
from forge_core.observability.metric_log import MetricLog
from forge_core.observability.metrics import record_metric
from forge_core.observability.reductions import Reduce
from forge_core.observability.tracing import trace
from forge_core.once import once
from forge_core.rewards.actor import RewardActor
from forge_core.rewards.resolve import RewardError, is_batch
from forge_core.runs.engines import build_generator, may_load_beside, takes_turns
from forge_core.runs.evaluation import evaluate
from forge_core.runs.evaluation_schedule import Evaluations
from forge_core.runs.planning import Planner, shard_count, signal_share
from forge_core.runs.reading_ahead import ReadAhead
from forge_core.runs.record import RunRecord, RunRef, check_stored_code, load_run, refuse_generation
from forge_core.runs.reference_session import ReferenceSession, Teacher
from forge_core.runs.shard_manifests import ShardManifests
from forge_core.runs.space import Space
from forge_core.runs.tracking import ShardTracker, Untracked
from forge_core.runs.trainer_session import TrainerSession
from forge_core.runs.turns import NoTurns, Turns
from forge_core.stop import StopToken
from forge_core.store import CorruptObject, Ledger, Manifest, Store, digest, layout, open_store
from forge_core.store.plans import put_plan
from forge_core.temporary import remove_abandoned
from forge_core.training.launch import node_count
from forge_core.weights.prefetch import Prefetcher

if TYPE_CHECKING:
    from forge_core.environments.rollout import Play
    from forge_core.runs.consumption import StepData

log = logging.getLogger("forge")
_contexts: dict[RunRef, RunContext] = {}
_registry_lock = threading.Lock()


def attach(ref: RunRef, context: RunContext) -> None:
    """Make ``context`` the one that tasks of this process find under ``ref``."""
    with _registry_lock:
        _contexts[ref] = context


def detach(ref: RunRef) -> None:
    """Tasks of this process no longer find the context of ``ref``, which stays open."""
    with _registry_lock:
        _contexts.pop(ref, None)


def context_of(ref: RunRef) -> RunContext:
    """The context of ``ref`` in this process, opened from the store when nobody attached one."""
    with _registry_lock:
        if ref not in _contexts:
            store = open_store(ref.store)
            _contexts[ref] = RunContext(store, load_run(store, ref.run_id))
        return _contexts[ref]


class RunContext:
    """``stop`` ends every engine call. ``observers`` are called with each entry that this process commits, ``note``
    with news for a person. ``background`` does what must neither delay nor fail a step, such as deleting what nothing
    reaches. ``weights`` keeps the run's weights on this host, ``shards`` opens shards of its batches. ``role``: the one
    that this process works for; None: for all of them. ``evaluate``: how the evaluation of a version comes to be: this
    process makes it, one at a time (``evaluating``), or waits for another. ``evaluations``: which are due, and there.
    ``samples``: whether runs of this kind sample episodes of prompts. ``teacher``: of a run that distils."""

    samples = True

    def __init__(
        self, store: Store, record: RunRecord, stop: StopToken | None = None, *, role: str | None = None
    ) -> None:
        if not record.code_checked:
            check_stored_code(record)
        remove_abandoned()
        self.store, self.record, self.config = store, record, record.config
        self.run_id = record.run_id
        self.stop = stop or StopToken()
        self.attempt = uuid.uuid4().hex[:8]
        self.ledger = Ledger(store, record.run_id)
        self.candidates: dict[int, str] = {}
        self.teacher = Teacher(self.config)
        self.shards = ShardManifests(store, self.config.max_staleness + 2)  # of the open batches and the last
        self.ahead: ReadAhead[StepData] = ReadAhead()
        self.metric_log = MetricLog(store, record.run_id, record.created_at, record.config, role, self.shards)
        self.observers: list[Callable[[dict[str, Any]], None]] = [self._prefetch_weights, self.metric_log.commit]
        self.note: Callable[[str], None] = log.warning  # which is shown
        self.background = BestEffort(limit_s=120.0, name="background")
        self.space = Space(store, count=self.config.alarms.bucket_gib is not None)
        w = self.config.weights
        self.weights = Prefetcher(store, self._weights_manifest, w.fetchers, enabled=w.prefetch, stop=self.stop)
        self.role = role
        self.evaluate: Callable[[RunContext, int], Any] = evaluate
        self.evaluations = Evaluations(store, self.run_id, self.ledger, self.config)
        self.evaluating = threading.Lock()
        self._plans: dict[int, dict[str, Any]] = {}
        self._lock = threading.RLock()  # of plans
        self._generator: Generator | None = None
        self._generator_lock = threading.Lock()  # loading, or moving to a version
        self._trainer_after_engine: int | None = None  # the version that it is loaded at then
        self._lease: Lease | None = None  # of this process's GPUs
        self._closed = False

    # Data ---------------------------------------------------------------------------------------------------------

    @once
    def prompts(self) -> PromptSet:
        """The data set, read when first asked for. Raises DataError."""
        assert self.config.dataset is not None
        return load_prompts(self.config.dataset, seed=self.config.run.seed)

    @once
    def train_rows(self) -> list[int]:
        """The rows of ``prompts`` that are trained on: those that are not held out."""
        share = 0.0 if self.config.eval.split or not self.config.eval.prompts else self.config.eval.holdout
        return split_holdout(self.prompts, share)[0]

    @once
    def heldout(self) -> list[Prompt]:
        """The prompts of an evaluation."""
        return heldout_prompts(self.config, self.prompts)

    @once
    def heldout_ids(self) -> dict[int, list[int]]:
        """Token ids of the prompts of an evaluation, by row: the same for every version."""
        return {prompt.row: self.encode(prompt) for prompt in self.heldout}

    @once
    def tokenizer(self) -> Any:
        """The tokenizer that version 0 published."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.weights_dir(0), trust_remote_code=False)

    @once
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer's files, chat template included, as version 0 published them."""
        files = self.store.open_published(self.ledger.weights_prefix(0)).manifest.files
        named = {
            f.name: f.sha256 for f in files if f.name.startswith(("tokenizer", "chat_template", "vocab", "merges"))
        }
        return digest(named)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ModelError for a character that a character tokenizer lacks."""
        section = self.config.dataset
        text = "".join(message["content"] for message in prompt.messages)
        check_encodable(self.tokenizer, text, f"dataset.path: row {prompt.row},")
        return render(prompt, self.tokenizer, section.chat_template if section else None, self.tools)

    @once
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Definitions of what the policy may call."""
        return tools_of(self.config.environment)

    @once
    def play(self) -> Play | None:
        """How episodes of several turns are played; None: a response is one turn."""
        return None if self.config.environment is None else build_play(self.config, self.tokenizer)

    # Plans --------------------------------------------------------------------------------------------------------

    @once
    def rollouts(self) -> ShardTracker | Untracked:
        """Which shards this process has sampled."""
        # A batch that may be refilled is not generated before its refill has ended, which counts as one more shard.
        shards = shard_count(self.config) + self.config.filters.dynamic_sampling
        return ShardTracker(shards) if self.role is None else Untracked()

    @once
    def planner(self) -> Planner:
        """Makes plans of batches; ``plan`` stores them."""
        encode = lambda row: self.encode(self.prompts[row])
        section = self.config.dataset
        curriculum = curriculum_of(self.prompts, self.train_rows, section.curriculum if section else None)
        return Planner(self.config, self.prompts, self.train_rows, encode, curriculum)

    def plan(self, batch: int) -> dict[str, Any]:
        """The stored plan of ``batch`` (round 0), made now (in batch order) if nobody made it before."""
        with self._lock:
            if batch not in self._plans:
                self._plans[batch] = self.stored_plan(batch, 0) or self._make_plan(batch)
                self._plans.pop(batch - self.config.max_staleness - 2, None)
            return self._plans[batch]

    def stored_plan(self, batch: int, round: int) -> dict[str, Any] | None:
        """The plan of one round, if it was made."""
        key = layout.plan(self.run_id, batch, round)
        return self.store.read_json(key) if self.store.exists(key) else None

    def rounds(self, batch: int) -> list[dict[str, Any]]:
        """The plans of all rounds of ``batch`` that were made, round 0 first."""
        plans = [self.plan(batch)]
        while self.config.filters.dynamic_sampling and (plan := self.stored_plan(batch, len(plans))):
            plans.append(plan)
        return plans

    def _make_plan(self, batch: int) -> dict[str, Any]:
        refuse_generation(self.record)
        cursor = Cursor(**self.plan(batch - 1)["cursor"]["after"]) if batch else Cursor(0, 0)
        return put_plan(self.store, self.run_id, batch, 0, self.planner.plan(batch, cursor, self.signal(batch)))

    def signal(self, batch: int) -> float:
        """The share of groups that are expected to have signal in ``batch``, for ``filters.adaptive``: that of the
        newest batch which is trained on, whoever asks and whenever, before this one is sampled."""
        before = batch - self.config.max_staleness - 1
        return signal_share(self.ledger.entry(before) if before >= 0 else None) if self.config.filters.adaptive else 0.0

    # Weights and engines ------------------------------------------------------------------------------------------

    def weights_dir(self, version: int) -> Path:
        """A verified local folder with the weights of a committed version, or of this process's candidate.

        Version 0's stays as long as the process: the trainer exports its configuration and tokenizer again and again.
        """
        return self.weights.folder(version, pin=version == 0)

    def _prefetch_weights(self, entry: dict[str, Any]) -> None:
        if self._generator is not None:
            self.weights.prefetch(entry["version_out"])

    def weights_content(self, version: int) -> str:
        """Content digest of a version's weights. Raises CorruptObject when they are not those that were committed."""
        return self._weights_manifest(version).content

    def policy_digest(self, version: int) -> str:
        """What evaluations know a version's weights by."""
        return policy_digest(self._weights_manifest(version).files)

    def _weights_manifest(self, version: int) -> Manifest:
        manifest = self.store.open_published(self._weights_prefix(version)).manifest
        entry = self.ledger.entry(version - 1) if version else self.ledger.init()
        if entry is not None and entry["weights_digest"] != manifest.content:
            raise CorruptObject(
                f"{entry['weights']}: its content is {manifest.content[:12]}, the ledger committed "
                f"{entry['weights_digest'][:12]}: restore the object that the run published"
            )
        return manifest

    def _weights_prefix(self, version: int) -> str:
        return self.candidates.get(version) or self.ledger.weights_prefix(version)

    @once
    def cpu_threads(self) -> int:
        """Threads of one engine on the CPU: all cores on-policy, where engines take turns; else half."""
        cores = len(os.sched_getaffinity(0))
        return cores if self.config.max_staleness == 0 else max(1, cores // 2)

    @once
    def placement(self) -> Placement:
        """Which GPUs of this machine each role has."""
        config = self.config if self.role is None else alone(self.config, self.role)
        if self.record.parent:
            config = sampling_nothing(config)
        choose: Choose = lambda gpus: place(config, gpus, nodes=node_count())
        placement = self._leased(choose)
        check_leased(config, placement)
        known = placement_warnings(config, choose(visible_gpus()))  # the gate has told of these
        for warning in placement_warnings(config, placement):
            if warning not in known:
                self.note(f"warning: {warning}")
        return placement

    def _leased(self, choose: Choose) -> Placement:
        gpus = visible_gpus()
        placement, self._lease = lease(gpus, choose)
        if self._lease.warning:
            self.note(self._lease.warning)
        elif placement.shared and len(gpus) > 1:
            self.note(f"generator and trainer share GPU {placement.trainer[0]}: other processes of Forge have the rest")
        return placement

    def device(self, role: str) -> str:
        """Torch's name of the device of ``role`` (a key of ``services``) in this process."""
        return self.placement.device(role)

    @once
    def turns(self) -> Turns:
        """Generator and trainer on one GPU: who has it now. Without turns to take, everybody always does."""
        if not takes_turns(self):
            return NoTurns()
        engine: Callable[[str], None] = lambda act: getattr(self._generator, act)() if self._generator else None
        leave = {"generator": lambda: engine("sleep"), "trainer": lambda: self.trainer.free_cached()}
        return Turns(leave, {"generator": lambda: engine("wake")}, self.stop)

    @contextmanager
    def sampling(self, version: int) -> Iterator[Generator]:
        """The sampling engine, at ``version`` or newer, with the right to use its device."""
        with self.turns.on("generator"):
            yield self.generator(version)

    def generator(self, version: int) -> Generator:
        """The sampling engine, at ``version`` or newer: loaded on first use, moved forward otherwise. An engine that is
        too new for a pinned version (its shard was another process's, which is gone) is loaded again."""
        with self._generator_lock:
            if self._too_new(version):
                self.forget_generator()
            if self._generator is None:
                self._generator = build_generator(self, version)
                self._engine_loaded()
            if self._generator.get_version() < version:
                with trace("generator_perf/update_weights"):
                    self._generator.update_weights(version)
                record_metric("generator/update_weights/count_weight_updates", 1, Reduce.SUM)
            return self._generator

    def forget_generator(self) -> None:
        """End the sampling engine, if there is one; the next that is asked for is loaded anew."""
        if self._generator is not None:
            self._generator.shutdown()
            self._generator = None

    def prefetch(self, version: int) -> None:
        """Begin to fetch ``version``, where this process samples and has none as new."""
        if self._generator is not None and version > self._generator.get_version():
            self.weights.prefetch(version)

    def _too_new(self, version: int) -> bool:
        pinned = self.role is not None and self.config.rollout.version == "oldest"
        return pinned and self._generator is not None and self._generator.get_version() > version

    @once
    def rewards(self) -> RewardActor:
        return RewardActor.from_config(self.config.rewards)

    def start_grading(self, version: int) -> None:
        """Begin to start the grading processes, which takes seconds, while the first batch is sampled. Whoever grades
        first waits for that, and meets again what went wrong with it. Rewards that grade many items at once may load a
        model: they are made when they are needed."""
        if version < self.config.steps and not any(is_batch(path) for path in self.config.rewards.paths):
            threading.Thread(target=self._start_grading, name="rewards-starting", daemon=True).start()

    def _start_grading(self) -> None:
        try:
            _ = self.rewards
        except RewardError as error:
            log.debug("the rewards could not be made ahead of the first grade: %s", error)
        if self._closed:
            self._end("rewards")

    @once
    def reference(self) -> ReferenceSession:
        return ReferenceSession(self)

    @once
    def trainer(self) -> TrainerSession:
        return TrainerSession(self)

    def load_trainer(self, version: int) -> None:
        """Begin to load the trainer, at ``version``, while the first batch is sampled, where that is others' work. On a
        GPU that both use, an engine that measures the free memory while it is loaded comes first. (Where they take
        turns the trainer is loaded when it has its first.)"""
        beside = self.role == "trainer" or self.config.generator.backend == "vllm"
        if version >= self.config.steps or not beside or takes_turns(self):
            return
        if self.placement.shared and not may_load_beside(self.config):
            self._trainer_after_engine = version
        else:
            self.trainer.begin(version)

    def _engine_loaded(self) -> None:
        if self._trainer_after_engine is not None:
            self.trainer.begin(self._trainer_after_engine)
            self._trainer_after_engine = None

    def close(self) -> None:
        """End the engines of this process, and what it still does in the background; then its GPUs are free."""
        self._closed = True
        try:
            self._close()
        finally:
            if self._lease:
                self._lease.close()

    def _close(self) -> None:
        self.background.close(timeout=10.0)
        self.ahead.close()
        self.space.close(timeout=0.0)
        self.metric_log.close()
        self.forget_generator()
        for name in ("trainer", "reference", "rewards"):
            self._end(name)
        self.weights.close()

    def _end(self, name: str) -> None:
        if made := self.__dict__.pop(name, None):
            made.close()

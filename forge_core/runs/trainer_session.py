"""The trainer of a run: it knows which version its parameters are, and gets them to any committed version.

Invariants:
- ``learn(b)`` takes its optimizer steps exactly once on state ``b``. Called again on state ``b + 1`` with nothing
  committed (the commit failed) it returns the same outcome without stepping; on any other state it reloads and
  replays.
- Replay takes the committed steps after the newest complete checkpoint again, from stored objects; it generates,
  grades and publishes nothing, and compares every state with its ledger entry's ``state_digest``.
- A first step on what the sampler computed otherwise than the trainer is an error (``sampler_check.py``).
- A step that was interrupted halfway leaves no state behind that anybody uses; nor do ranks that died.
- One rank works in this process, several (or ``training.own_process``) in a child group, which
  ``rank_trainer.build_trainer`` decides: the rest is the same.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from forge_core.algorithms.losses import build_loss
from forge_core.algorithms.losses.base import ONE_VERSION_GAP
from forge_core.algorithms.metrics import over_steps
from forge_core.algorithms.ops import Totals
from forge_core.engine_thread import EngineClosed, EngineThread
from forge_core.processes import ChildDied
from forge_core.runs.consumption import load_committed, optimizer_batches
from forge_core.runs.rank_trainer import Trainer, build_trainer
from forge_core.runs.sampler_check import check_sampler
from forge_core.store import File, entry_digest, layout
from forge_core.store.checkpoints import publish_checkpoint
from forge_core.temporary import temporary_folder
from forge_core.training.packing import PAD_ID, Sample
from forge_core.training.settings import TrainerSettings

if TYPE_CHECKING:
    from forge_core.config import RunConfig
    from forge_core.runs.context import RunContext

T = TypeVar("T")
log = logging.getLogger("forge")


class DriftError(RuntimeError):
    """Replayed parameters differ from those of the ledger."""


@dataclass(frozen=True)
class Outcome:
    """One training step's result: ``stepped`` is false when no token was trainable."""

    stepped: bool
    metrics: dict[str, float]
    state_digest: str


class Step(Protocol):
    """What a training step trains on: ``StepData``, or what a supervised run has in its stead."""

    @property
    def batch(self) -> int: ...


class TrainerSession:
    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._thread = EngineThread("trainer", ctx.config.training.threads or ctx.cpu_threads)
        self._trainer: Trainer | None = None
        self._loss: Any = self._make_loss()()
        self._version: int | None = None
        self._uncommitted: tuple[int, Outcome] | None = None
        self._exact = ctx.device("trainer") == "cpu"
        self._drift: float | None = None  # of the replay that this process began with, until a step records it
        self._awaited = False  # whether somebody waits for a step
        self._first: dict[str, float] = {}  # metrics of the first optimizer step on the newest batch

    def prepare(self, version: int) -> None:
        """Load the trainer and bring it to ``version``."""
        self._call(self._at, version)

    def begin(self, version: int) -> None:
        """Begin to load the trainer, at ``version``, unless it is loaded, and to make its code for micro-batches of
        every shape, until a step is to be taken. Whoever needs it waits for that, and meets again what went wrong with
        it."""
        threading.Thread(target=self._begin, args=(version,), name="trainer-loading", daemon=True).start()

    def _begin(self, version: int) -> None:
        try:
            self._call(lambda: None if self._trainer else self._at(version))
            sample = self._like_those_of_steps()
            next(place for place in count() if self._awaited or not self._call(self._warm_up, sample, place))
        except Exception as error:
            if self._trainer is not None and not self._trainer.alive():
                self._ctx.note(f"the trainer's first step loads it again: {error}")
            log.debug("the trainer could not be loaded ahead of its first step: %s", error)

    def _warm_up(self, sample: Sample, place: int) -> bool:
        temperature = self._ctx.config.grpo.temperature
        return not self._awaited and self._loaded().warm_up(sample, place, temperature=temperature)

    def learn(self, data: Step) -> Outcome:
        """The optimizer steps of one batch, on state ``data.batch``."""
        self._awaited = True
        return self._call(self._learn, data)

    def upload_weights(self, prefix: str, kept: Path) -> tuple[File, ...]:
        """Upload the current parameters in HF format, below ``prefix``; each rank its share. The files of this host's
        ranks stay in the folder ``kept``."""
        return self._call(self._loaded().upload_weights, prefix, kept)

    def checkpoint(self, entry: dict[str, Any]) -> str:
        """Save the state after ``entry`` as ``checkpoints/<batch>-<attempt>/``; returns the prefix."""
        return self._call(self._checkpoint, entry)

    def free_cached(self) -> None:
        """Give the GPU what the trainer keeps of freed memory, for whoever has the next turn on it."""
        if self._trainer is not None:
            with suppress(ChildDied, EngineClosed):  # then it keeps nothing
                self._thread.call(self._trainer.free_cached)

    def close(self) -> None:
        if self._trainer is not None:
            self._thread.call(self._trainer.cleanup)
        self._thread.close()

    def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do ``work`` in the trainer's thread, while no generator uses its GPU."""
        with self._ctx.turns.on("trainer"):
            return self._thread.call(work, *arguments)

    def _loaded(self) -> Trainer:
        assert self._trainer is not None, "prepare() or learn() comes first"
        return self._trainer

    def _forget_dead(self) -> None:
        """What ranks that are gone held is unknown from here on."""
        if self._trainer is not None and not self._trainer.alive():
            self._trainer.cleanup()
            self._trainer, self._version, self._uncommitted = None, None, None

    def _learn(self, data: Step) -> Outcome:
        self._forget_dead()
        if self._uncommitted and self._uncommitted[0] == data.batch and self._version == data.batch + 1:
            return self._uncommitted[1]
        self._at(data.batch)
        started = time.monotonic()
        stepped, metrics = self._step(data)
        self._check_sampler(data.batch)
        metrics["time/train"] = time.monotonic() - started
        self._warn_of_mismatch(data.batch, metrics)
        if self._drift is not None:
            metrics["resume/drift"], self._drift = self._drift, None
        started = time.monotonic()
        outcome = Outcome(stepped, metrics, self._loaded().state_digest())
        metrics["time/state_digest"] = time.monotonic() - started
        self._uncommitted = (data.batch, outcome)
        return outcome

    def _at(self, version: int) -> None:
        """Bring the parameters to ``version``: nothing to do, or reload and replay."""
        self._forget_dead()
        if self._version == version:
            return
        self._uncommitted = None
        at = self._restore(version)
        for batch in range(at, version):
            self._replay(batch)
        if at < version and not self._exact:
            self._accept_drift(version)
        self._version = version

    def _restore(self, version: int) -> int:
        """Load the newest complete checkpoint at or before ``version``, or version 0; returns the version loaded."""
        ctx, self._version = self._ctx, None
        found = newest_checkpoint(ctx, version)
        if self._trainer is None or found is None:
            self._trainer = self._build()
        if found is None:
            return 0
        batch, prefix = found
        extra = self._trainer.load_checkpoint(prefix)
        self._loss.load_state(extra.get("loss", {}))
        self._compare(batch, "checkpoint")
        return batch + 1

    def _build(self) -> Trainer:
        if self._trainer is not None:
            self._trainer.cleanup()
        make_loss = self._make_loss()
        self._loss = make_loss()
        trainer = build_trainer(self._ctx, self._settings(), self._loss, make_loss)
        trainer.setup()
        return trainer

    def _settings(self) -> TrainerSettings:
        """The schedule's horizon is the one that the run started with, whatever ``steps`` was changed to since."""
        record = self._ctx.record
        horizon = record.original.optimizer_steps
        return dataclasses.replace(self._settings_of(record.config), total_steps=horizon)

    def _replay(self, batch: int) -> None:
        entry = self._ctx.ledger.entry(batch)
        assert entry is not None, f"ledger entry {batch} is missing"
        self._step(self._committed(entry))
        self._compare(batch, "replay")

    def _compare(self, batch: int, source: str) -> None:
        """The state must be the ledger's: exactly on a CPU, within ``resume.max_drift`` where kernels are not exact."""
        entry = self._ctx.ledger.entry(batch)
        assert entry is not None, f"ledger entry {batch} is missing"
        found = self._loaded().state_digest()
        if found == entry["state_digest"]:
            return
        if self._exact or source == "checkpoint":
            raise DriftError(
                f"{source} of training step {batch} gives parameters {found[:12]}, the ledger has "
                f"{entry['state_digest'][:12]}: another kind of machine, another torch, or changed code. "
                "Resume where the run was made, or start a new run from its exported weights (forge export)"
            )

    def _accept_drift(self, version: int) -> None:
        """After an inexact replay: the parameters must be close to the published ones; the distance is recorded."""
        with temporary_folder("drift") as folder:
            self._loaded().push_weights(folder)
            self._drift = relative_distance(folder, self._ctx.weights_dir(version))
        limit = self._ctx.config.resume.max_drift
        self._ctx.note(f"replayed parameters differ from version {version} by {self._drift:.2e} (relative)")
        if self._drift > limit:
            raise DriftError(
                f"replay gives parameters that differ from version {version} by {self._drift:.2e}, more than "
                f"resume.max_drift={limit}: resume on the kind of machine that made the run, or allow more drift"
            )

    # What a supervised run does its own way -----------------------------------------------------------------------

    def _make_loss(self) -> Callable[[], Any]:
        """A function that makes the loss, on this rank or another."""
        return partial(build_loss, self._ctx.config)

    def _settings_of(self, config: RunConfig) -> TrainerSettings:
        return TrainerSettings.from_config(config)

    def _committed(self, entry: dict[str, Any]) -> Any:
        """What the committed step ``entry`` trained on."""
        return load_committed(self._ctx, entry)

    def _step(self, data: Any) -> tuple[bool, dict[str, float]]:
        """All optimizer steps of one batch; the version is unknown while they run."""
        self._version = None
        steps = [(samples, totals) for samples, totals in optimizer_batches(data, self._ctx.config) if samples]
        if self._loss.needs_proximal and len(steps) * self._ctx.config.training.epochs_per_batch > 1:
            steps = [(self._with_proximal(samples), totals) for samples, totals in steps]
        metrics = [m for samples, totals in steps for m in self._optimizer_step(samples, totals)]
        self._first = metrics[0] if metrics else {}
        self._version = data.batch + 1
        return bool(metrics), over_steps(metrics)

    def _like_those_of_steps(self) -> Sample:
        """A sample with what those of a step have; it decides which code is made, not what that computes."""
        settings = self._settings()
        length = max(2, min(settings.seq_len, settings.token_budget))
        zeros = [0.0] * length
        return Sample(
            tokens=[PAD_ID] * length,
            loss_mask=[False] + [True] * (length - 1),
            weights=zeros,
            generator_logprobs=zeros,
            ref_logprobs=zeros if self._ctx.config.grpo.beta > 0 else None,
        )

    def _with_proximal(self, samples: list[Sample]) -> list[Sample]:
        """The samples with log-probabilities of the policy that this training step starts from."""
        temperature = self._ctx.config.grpo.temperature
        found = self._loaded().logprobs_samples(samples, temperature=temperature, stop=self._ctx.stop)
        return [dataclasses.replace(s, proximal_logprobs=_along(s, f)) for s, f in zip(samples, found, strict=True)]

    def _optimizer_step(self, samples: list[Sample], totals: Totals) -> list[dict[str, float]]:
        config, trainer = self._ctx.config, self._loaded()
        metrics = []
        for _ in range(config.training.epochs_per_batch):
            result, step = trainer.train_samples(
                samples, totals=totals, temperature=config.grpo.temperature, stop=self._ctx.stop
            )
            learned = {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate}
            found = {"loss": result.loss, **self._loss.finish(result.metrics), **learned}
            metrics.append({**found, **self._loss.after_step(found)})
        return metrics

    def _check_sampler(self, batch: int) -> None:
        check_sampler(self._ctx, batch, self._first.get(ONE_VERSION_GAP))

    def _warn_of_mismatch(self, batch: int, metrics: dict[str, float]) -> None:
        limit, found = self._loss.mismatch_alarm, metrics.get(ONE_VERSION_GAP, 0.0)
        if limit is not None and found > limit:
            self._ctx.note(
                f"training step {batch}: log-probabilities of sampler and trainer differ by {found:.3g} on average, "
                f"more than loss.mismatch_alarm={limit}: other kernels or types, truncated sampling, or old episodes"
            )

    def _checkpoint(self, entry: dict[str, Any]) -> str:
        self._at(entry["version_out"])
        ctx, attempt = self._ctx, entry["attempt"]
        extra = {"cursor": entry["cursor"], "version": entry["version_out"], "loss": self._loss.state()}
        prefix = layout.checkpoint(ctx.run_id, entry["batch"], attempt)
        files = self._loaded().upload_checkpoint(prefix, extra)
        return publish_checkpoint(ctx.store, ctx.run_id, entry, attempt, files).prefix


def _along(sample: Sample, found: list[float]) -> list[float]:
    """Values of the counted tokens as a list along all tokens (the first token is never predicted)."""
    values = iter(found)
    return [0.0, *(next(values) if counts else 0.0 for counts in sample.loss_mask[1:])]


def newest_checkpoint(ctx: RunContext, version: int) -> tuple[int, str] | None:
    """Batch and prefix of the newest complete checkpoint that gives ``version`` or an older one."""
    for batch in range(version - 1, -1, -1):
        entry = ctx.ledger.entry(batch)
        assert entry is not None, f"ledger entry {batch} is missing"
        prefix = layout.checkpoint(ctx.run_id, batch, entry["attempt"])
        if ctx.store.published(prefix):
            ctx.store.open_published(prefix, request=entry_digest(entry))
            return batch, prefix
    return None


def relative_distance(folder: Path, other: Path) -> float:
    """``|a - b| / |b|`` (L2, over all tensors) of the safetensors in two model folders."""
    from forge_core.models.weights import read_tensors

    ours, theirs = read_tensors(folder), read_tensors(other)
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    size = sum(float(t.double().square().sum()) for t in theirs.values())
    return (difference / size) ** 0.5

"""TitanTrainer: forward, backward and optimizer steps on torchtitan's model code, on one rank or many.

Guarantees:
- Ranks are the processes of the current process group; all of them make the same calls in the same order. The same
  code runs on one. ``train_samples`` and ``logprobs_samples`` take the whole step's documents on every rank and return
  the whole step's results on every rank; ``forward_backward`` takes this data-parallel rank's own micro-batches.
- Gradients do not depend on how an optimizer step is split into micro-batches (beyond rounding): losses divide by
  global counts, and gradients only add up.
- After ``load`` training goes on bit for bit as if it had not stopped (on a CPU or with deterministic kernels).
- Master weights and optimizer state are float32 whatever the compute type.
- A step whose gradient is not finite changes nothing and is an error.
- Micro-batches follow each other on the device without waiting for it; it is read once a call.
- Nothing heavy happens before ``setup``. All calls must come from one thread, any thread.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from forge_core.algorithms.metrics import accumulate
from forge_core.algorithms.ops import Totals
from forge_core.data_model import ForwardBackwardResult, OptimStepResult, TextTrainBatch
from forge_core.devices import work_on
from forge_core.stop import StopToken
from forge_core.training import hf_io, lora, policy, sharing
from forge_core.training.architecture import hf_names, read_architecture
from forge_core.training.checkpoint import load_checkpoint, save_checkpoint
from forge_core.training.collectives import check_stop, gathered, reduced
from forge_core.training.hf_export import export
from forge_core.training.masters import Masters
from forge_core.training.micro_loss import Loss, micro_loss
from forge_core.training.optimizer import ShardedAdamW, learning_rate
from forge_core.training.packed_rows import PackedRows
from forge_core.training.packing import PAD_ID, Sample, build, documents, full_of, shapes, sizes_for
from forge_core.training.pipeline import FLUSH
from forge_core.training.policy import Prepared
from forge_core.training.published_probe import write_probe
from forge_core.training.settings import TrainerSettings
from forge_core.training.state_digest import state_digest

Batches = TextTrainBatch | Sequence[TextTrainBatch]
Samples = Sequence[Sample] | PackedRows  # what an optimizer step trains on: to be packed, or packed already


def _listed(batches: Batches) -> list[TextTrainBatch]:
    return [batches] if isinstance(batches, TextTrainBatch) else list(batches)


class TitanTrainer:
    """``model_dir``: a Hugging Face folder. ``loss``: used where a call names none. ``threads``: CPU threads of the
    calling thread, set in ``setup`` (None: left alone), as is the thread's device."""

    def __init__(
        self,
        model_dir: Path,
        settings: TrainerSettings,
        loss: Loss,
        *,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        self.model_dir, self.settings, self.loss = Path(model_dir), settings, loss
        self.device, self.threads = torch.device(device), threads
        self.step = 0  # optimizer steps done
        self._model: Any = None
        self._masters: Any = None
        self._optimizer: ShardedAdamW | None = None
        self._sharded: list[Any] = []  # parts of the model that FSDP divides
        self._has_gradients = False

    @property
    def _dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.settings.dtype))

    def setup(self) -> None:
        """Load the weights and make the optimizer. Raises ValueError for a folder that cannot be trained exactly."""
        self._arch = read_architecture(self.model_dir)
        from forge_core.training.titan_parallel import build_model, sharded, uncompiled

        work_on(self.device)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self._uncompiled = uncompiled
        self._model, self._mesh = build_model(self._arch, self.settings, self.device)
        self._sharded = sharded(self._model)
        self._pipeline = self._mesh.pipeline(self._arch.dim, self._dtype, self.device, self.settings.timeout_s)
        self._masters = Masters(self._model, self._dtype)
        hf_io.load_weights(self._masters.parameters, self._arch, self.model_dir)
        if self.settings.lora is not None:
            lora.initialise(self._masters.trained, self.settings.lora.seed)
        self._masters.refresh()
        self._optimizer = ShardedAdamW(self._masters.trained, self.settings, replicas=self.settings.tensor_parallel)
        self.step, self._has_gradients = 0, False

    def warm_up(self, sample: Sample, place: int, *, temperature: float) -> bool:
        """Make the code for the ``place``-th shape that micro-batches may have, before a step needs it: the work of a
        step on copies of ``sample``, of which nothing is left. Returns whether there was such a shape: none where any
        may come, and none under pipeline parallelism."""
        s = self.settings
        known = shapes(s.token_budget, s.seq_len, sizes_for(self.device, s.compile))
        if self._pipeline is not None or place >= len(known):
            return False
        batch = full_of(sample, known[place])
        with self._whole():
            self.forward_backward(batch, temperature=temperature)
        self.clear_gradients()
        return True

    def train_samples(
        self, samples: Samples, *, totals: Totals, temperature: float, stop: StopToken | None = None
    ) -> tuple[ForwardBackwardResult, OptimStepResult]:
        """One optimizer step on ``samples``, divided among the data-parallel ranks; results are of all of them.

        Raises ``Stopped`` between micro-batches, on every rank, when ``stop`` is set on any of them; nothing of such a
        step is left.
        """
        with self._whole():
            sums = self._accumulate(self._own_batches(samples), self.loss, temperature, totals, stop)
        stepped = self.optim_step()  # waits for the device, after which the metrics are there too
        return self._result(sums, whole=True), stepped

    def logprobs_samples(
        self, samples: Samples, *, temperature: float, stop: StopToken | None = None
    ) -> list[list[float]]:
        """Per sample, in order: log-probabilities of its tokens that count, computed by all ranks together."""
        own = self._logprobs(list(self._own_batches(samples)), temperature, stop, count=len(samples))
        shares = gathered(own, self._mesh.group("batch"))
        return [next((own for own in found if own), []) for found in zip(*shares, strict=True)]

    def forward_backward(
        self,
        batches: Batches,
        loss_fn: Loss | None = None,
        *,
        temperature: float = 1.0,
        totals: Totals | None = None,
        stop: StopToken | None = None,
    ) -> ForwardBackwardResult:
        """Add the gradients of ``batches`` to those already there.

        ``totals`` are the loss's denominators; left out, they count over all batches of this call (of this rank: with
        several, give the sums). ``temperature`` is the one that tokens were sampled at. Raises ``Stopped`` between
        micro-batches when ``stop`` is set; call ``clear_gradients`` before going on after that.
        """
        micro_batches = _listed(batches)
        totals = totals or self._count(micro_batches)
        sums = self._accumulate(micro_batches, loss_fn or self.loss, temperature, totals, stop)
        return self._result(sums, whole=False)

    def _accumulate(
        self,
        batches: Iterable[TextTrainBatch],
        loss_fn: Loss,
        temperature: float,
        totals: Totals,
        stop: StopToken | None,
    ) -> dict[str, Tensor]:
        """Add gradients; returns the sums of loss and metrics, still on the device."""
        model, _ = self._ready()
        longest = self.settings.row_positions
        sums: dict[str, Tensor] = {}

        def loss_of(prepared: Prepared) -> Tensor:
            loss, metrics = micro_loss(model, prepared, loss_fn, temperature, totals)
            accumulate(sums, {"": loss, **metrics})
            return loss

        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            for group in self._flushes(batches):
                check_stop(stop, together=True)
                prepared = [policy.prepare(self._padded(batch), self.device, self._dtype, longest) for batch in group]
                if self._pipeline is None:
                    loss_of(prepared[0]).backward()
                else:
                    self._pipeline.forward_backward(model, prepared, loss_of)
                self._masters.collect()
                self._has_gradients = True
        return sums

    def _result(self, sums: dict[str, Tensor], *, whole: bool) -> ForwardBackwardResult:
        """Loss and metrics as numbers; ``whole``: of all data-parallel ranks."""
        values = reduced(sums, self._mesh.group("batch") if whole else None, self.device)
        values = gathered(values, self._mesh.group("pp"))[-1]  # of the last pipeline stage
        return ForwardBackwardResult(values.pop("", 0.0), values)

    @property
    def _flush(self) -> int:
        """How many micro-batches there are from one look for a stop to the next: one, or what fills a pipeline."""
        return 1 if self._pipeline is None else FLUSH * self.settings.pipeline_parallel

    def _flushes(self, batches: Iterable[TextTrainBatch]) -> Iterator[list[TextTrainBatch]]:
        """Micro-batches between which a stop is looked for."""
        remaining = iter(batches)
        while group := list(islice(remaining, self._flush)):
            yield group

    def _logprobs(
        self, batches: list[TextTrainBatch], temperature: float, stop: StopToken | None, count: int | None = None
    ) -> list[list[float]]:
        model, _ = self._ready()

        def finish(prepared: Prepared) -> Tensor:
            return policy.logprobs(model, prepared, temperature)[0]

        def compute(prepared: Prepared) -> Tensor | None:
            return finish(prepared) if self._pipeline is None else self._pipeline.forward(model, prepared, finish)

        batches = [self._padded(batch) for batch in batches]
        longest = self.settings.row_positions
        own = policy.document_logprobs(
            compute, batches, self._dtype, self.device, longest, stop, count=count, together=True, between=self._flush
        )
        return gathered(own, self._mesh.group("pp"))[-1]

    def _padded(self, batch: TextTrainBatch) -> TextTrainBatch:
        return policy.padded(batch, self.settings.row_multiple)

    def _own_batches(self, samples: Samples) -> Iterable[TextTrainBatch]:
        """This rank's micro-batches, built as they are asked for."""
        s, sizes = self.settings, sizes_for(self.device, self.settings.compile)
        if isinstance(samples, PackedRows):
            return samples.micro_batches(self._mesh.data_rank, s.data_parallel, s.token_budget)
        ranks = sharing.layouts(samples, s.token_budget, s.seq_len, s.data_parallel, sizes=sizes)
        return (build(samples, layout, PAD_ID) for layout in ranks[self._mesh.data_rank])

    def optim_step(self) -> OptimStepResult:
        """Clip the gradients, step, clear them. Raises RuntimeError without gradients, and when they are not finite:
        then nothing was changed."""
        _, optimizer = self._ready()
        if not self._has_gradients:
            raise RuntimeError("optim_step has no gradients to apply: call forward_backward first")
        rate = learning_rate(self.step, self.settings)
        norm = optimizer.clip()
        optimizer.step(rate, norm)
        self._masters.refresh()
        self.clear_gradients()
        found = norm.item()  # the device has all of the step by now
        if not math.isfinite(found):
            raise RuntimeError(
                f"optimizer step {self.step} has gradient norm {found}: nothing was changed; a loss or an advantage "
                "that is not finite makes such a gradient (the loss is loss.name, or loss.path)"
            )
        self.step += 1
        return OptimStepResult(self.step, rate, found)

    def train_step(
        self,
        batches: Batches,
        loss_fn: Loss | None = None,
        *,
        temperature: float = 1.0,
        totals: Totals | None = None,
        stop: StopToken | None = None,
    ) -> tuple[ForwardBackwardResult, OptimStepResult]:
        """``forward_backward`` and ``optim_step``; nothing is left of a step that is stopped."""
        with self._whole():
            result = self.forward_backward(batches, loss_fn, temperature=temperature, totals=totals, stop=stop)
        return result, self.optim_step()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """For gradients of one step that are of no use without the rest of it."""
        try:
            yield
        except BaseException:
            self.clear_gradients()
            raise

    def clear_gradients(self) -> None:
        """Forget accumulated gradients."""
        self._ready()[1].clear()
        self._masters.clear()
        self._has_gradients = False

    def logprobs(self, batches: Batches, temperature: float = 1.0, stop: StopToken | None = None) -> list[list[float]]:
        """Per document, in order of ``document_ids``: log-probabilities at its positions with ``target_mask`` 1."""
        return self._logprobs(_listed(batches), temperature, stop)

    def save(self, folder: Path, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint; ``extra`` is any JSON-able state of the caller. Gradients are not part of it."""
        state = {"step": self.step, "extra": extra or {}}
        save_checkpoint(Path(folder), self._ready()[1].named_state(), state, self._mesh.group("pp"))

    def load(self, folder: Path) -> dict[str, Any]:
        """Go back to a checkpoint and return its ``extra``. Raises ValueError when it is of another model."""
        tensors = self._ready()[1].named_state()
        self.clear_gradients()
        state = load_checkpoint(Path(folder), tensors, self._mesh.group("pp"))
        self._masters.refresh()
        self.step = state["step"]
        return state["extra"]

    def push_weights(self, folder: Path, each: Callable[[Path], None] | None = None) -> None:
        """Write a Hugging Face folder: safetensors shards, ``config.json``, tokenizer files and the probe.

        Every rank writes its share of the shards, to a folder of its own or a common one, and calls ``each`` with
        every one of them once it is there (from several threads); rank 0 writes the rest.
        """
        self._ready()
        s, parameters, writers = self.settings, self._masters.parameters, self._mesh.writers
        final = None if s.lora is None else partial(lora.merged, parameters=parameters, lora=s.lora)
        exporting = export(
            parameters, self._arch, self.model_dir, Path(folder), s.weights_dtype, s.shard_bytes, writers, final, each
        )
        with exporting, self._uncompiled(self._ready()[0]):
            write_probe(Path(folder), self._arch.vocab_size, s, self.logprobs, writes=writers.first)

    def push_adapter(self, folder: Path) -> None:
        """Write the LoRA matrices to ``folder``, as ``peft`` reads them. Every rank calls it; rank 0 writes."""
        self._ready()
        assert self.settings.lora is not None
        trained, settings, names = self._masters.trained, self.settings.lora, hf_names(self._arch)
        lora.write_adapter(trained, names, settings, Path(folder), writes=self._mesh.writers.first)

    def state_digest(self) -> str:
        """Of the parameters that are trained; see ``state_digest.py``: equal on all ranks, and equal to that of one
        rank with the same parameters."""
        self._ready()
        return state_digest(self._masters.trained, self._mesh.group("pp"))

    def get_config(self) -> dict[str, Any]:
        """Settings, model folder and device, JSON-able."""
        settings = dataclasses.asdict(self.settings)
        return {"model_dir": str(self.model_dir), "device": str(self.device), "threads": self.threads, **settings}

    def get_status(self) -> dict[str, Any]:
        """Where the trainer stands: ``ready``, ``step``, the next step's ``learning_rate``, ``has_gradients`` and, once
        ready, the number of ``parameters``."""
        ready, rate = self._model is not None, learning_rate(self.step, self.settings)
        status = {"ready": ready, "step": self.step, "has_gradients": self._has_gradients, "learning_rate": rate}
        return status | ({"parameters": sum(p.numel() for p in self._masters.parameters.values())} if ready else {})

    def cleanup(self) -> None:
        """Free the model and the optimizer; ``setup`` starts afresh. The process group stays: others may share it."""
        self._model = self._masters = self._optimizer = None
        self._sharded, self._has_gradients = [], False

    def _ready(self) -> tuple[Any, ShardedAdamW]:
        if self._model is None or self._optimizer is None:
            raise RuntimeError("the trainer has no model: call setup() first")
        for module in self._sharded:
            module.reshard()
        return self._model, self._optimizer

    def _count(self, batches: Sequence[TextTrainBatch]) -> Totals:
        tokens = sum(int((batch.target_mask > 0).sum()) for batch in batches)
        return Totals(tokens, documents(batches), self.settings.horizon)

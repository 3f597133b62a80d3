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
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from forge_core.algorithms.metrics import accumulate, is_maximum
from forge_core.algorithms.ops import Totals
from forge_core.data_model import ForwardBackwardResult, OptimStepResult, TextTrainBatch
from forge_core.stop import StopToken
from forge_core.training import hf_io, policy, sharing
from forge_core.training.architecture import read_architecture
from forge_core.training.checkpoint import load_checkpoint, save_checkpoint
from forge_core.training.collectives import check_stop, gathered, reduced
from forge_core.training.optimizer import build_optimizer, learning_rate, named_state
from forge_core.training.packing import PAD_ID, Sample, build, documents, few_shapes
from forge_core.training.settings import TrainerSettings

Batches = TextTrainBatch | Sequence[TextTrainBatch]


class LogprobLoss(Protocol):
    """A loss over log-probabilities: the fast path, which never builds ``[B, T, V]`` logits."""

    def from_logprobs(
        self, logprobs_BT: Tensor, entropy_BT: Tensor, batch: TextTrainBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the loss over ``totals``, and metrics that add up over micro-batches."""
        ...


LogitsLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""``(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs) -> (loss, metrics)``: means over one
micro-batch, which the trainer weights by the micro-batch's share of loss tokens. Logits are float32, divided by the
temperature."""

Loss = LogprobLoss | LogitsLoss


class TitanTrainer:
    """``model_dir``: a Hugging Face folder. ``loss``: used where a call names none. ``threads``: CPU threads of the
    calling thread, set in ``setup`` (None: left alone)."""

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
        self._optimizer: torch.optim.AdamW | None = None
        self._has_gradients = False

    @property
    def _dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.settings.dtype))

    def setup(self) -> None:
        """Load the weights and make the optimizer. Raises ValueError for a folder that cannot be trained exactly."""
        self._arch = read_architecture(self.model_dir)
        from forge_core.training.titan_parallel import build_model, clip_grad_norm_, reshard

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self._clip, self._reshard = clip_grad_norm_, reshard
        self._model, self._mesh = build_model(self._arch, self.settings, self.device)
        hf_io.load_weights(self._model, self._arch, self.model_dir)
        self._optimizer = build_optimizer(self._model, self.settings)
        self.step, self._has_gradients = 0, False

    def train_samples(
        self, samples: Sequence[Sample], *, totals: Totals, temperature: float, stop: StopToken | None = None
    ) -> tuple[ForwardBackwardResult, OptimStepResult]:
        """One optimizer step on ``samples``, divided among the data-parallel ranks; results are of all of them.

        Raises ``Stopped`` between micro-batches, on every rank, when ``stop`` is set on any of them.
        """
        result = self._accumulate(self._own_batches(samples), self.loss, temperature, totals, stop, whole=True)
        return result, self.optim_step()

    def logprobs_samples(
        self, samples: Sequence[Sample], *, temperature: float, stop: StopToken | None = None
    ) -> list[list[float]]:
        """Per sample, in order: log-probabilities of its tokens with ``loss_mask``, computed by all ranks together."""
        model, _ = self._ready()
        batches = list(self._own_batches(samples))
        own = policy.document_logprobs(
            model, batches, self._dtype, temperature, self.device, stop, count=len(samples), together=True
        )
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

        ``totals`` are the loss's denominators; left out, they count over all batches of this call (of
        this rank: with several, give the sums). ``temperature`` is
        the one that tokens were sampled at. Raises ``Stopped`` between micro-batches when ``stop`` is set; call
        ``clear_gradients`` before going on after that.
        """
        micro_batches = [batches] if isinstance(batches, TextTrainBatch) else list(batches)
        totals = totals or self._count(micro_batches)
        return self._accumulate(micro_batches, loss_fn or self.loss, temperature, totals, stop, whole=False)

    def _accumulate(
        self,
        batches: Iterable[TextTrainBatch],
        loss_fn: Loss,
        temperature: float,
        totals: Totals,
        stop: StopToken | None,
        *,
        whole: bool,
    ) -> ForwardBackwardResult:
        """Add gradients; ``whole``: results are summed over the data-parallel ranks."""
        model, _ = self._ready()
        sums: dict[str, Tensor] = {}
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            for batch in batches:
                check_stop(stop, together=whole)
                batch = policy.padded(batch, self.settings.tensor_parallel)
                loss, metrics = _loss(model, batch, loss_fn, temperature, totals, self.device, self._dtype)
                loss.backward()
                self._has_gradients = True
                accumulate(sums, {"": loss, **metrics})
        values = reduced(sums, self._mesh.group("batch") if whole else None, self.device)
        return ForwardBackwardResult(values.pop("", 0.0), values)

    def _own_batches(self, samples: Sequence[Sample]) -> Iterable[TextTrainBatch]:
        """This rank's micro-batches, built as they are asked for."""
        s, fixed = self.settings, few_shapes(self.device, self.settings.compile)
        ranks = sharing.layouts(samples, s.token_budget, s.seq_len, s.data_parallel, fixed=fixed)
        own = (build(samples, layout, PAD_ID) for layout in ranks[self._mesh.data_rank])
        return (policy.padded(batch, s.tensor_parallel) for batch in own)

    def optim_step(self) -> OptimStepResult:
        """Clip the gradients, step, clear them. Raises RuntimeError without gradients or when they are not finite."""
        model, optimizer = self._ready()
        if not self._has_gradients:
            raise RuntimeError("optim_step has no gradients to apply: call forward_backward first")
        norm = float(self._clip(model.parameters(), self.settings.max_norm, foreach=True))
        if not math.isfinite(norm):
            self.clear_gradients()
            raise RuntimeError(f"optimizer step {self.step} has gradient norm {norm}: nothing was changed")
        rate = learning_rate(self.step, self.settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        self.clear_gradients()
        self.step += 1
        return OptimStepResult(self.step, rate, norm)

    def train_step(
        self,
        batches: Batches,
        loss_fn: Loss | None = None,
        *,
        temperature: float = 1.0,
        totals: Totals | None = None,
        stop: StopToken | None = None,
    ) -> tuple[ForwardBackwardResult, OptimStepResult]:
        """``forward_backward`` and ``optim_step``."""
        result = self.forward_backward(batches, loss_fn, temperature=temperature, totals=totals, stop=stop)
        return result, self.optim_step()

    def clear_gradients(self) -> None:
        """Forget accumulated gradients."""
        self._ready()[1].zero_grad(set_to_none=True)
        self._has_gradients = False

    def logprobs(self, batches: Batches, temperature: float = 1.0, stop: StopToken | None = None) -> list[list[float]]:
        """Per document, in order of ``document_ids``: log-probabilities at its positions with ``target_mask`` 1."""
        micro_batches = [batches] if isinstance(batches, TextTrainBatch) else list(batches)
        model, _ = self._ready()
        return policy.document_logprobs(model, micro_batches, self._dtype, temperature, self.device, stop)

    def save(self, folder: Path, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint; ``extra`` is any JSON-able state of the caller. Gradients are not part of it."""
        save_checkpoint(Path(folder), named_state(*self._ready()), {"step": self.step, "extra": extra or {}})

    def load(self, folder: Path) -> dict[str, Any]:
        """Go back to a checkpoint and return its ``extra``. Raises ValueError when it is of another model."""
        tensors = named_state(*self._ready())
        self.clear_gradients()
        state = load_checkpoint(Path(folder), tensors)
        self.step = state["step"]
        return state["extra"]

    def push_weights(self, folder: Path) -> None:
        """Write a Hugging Face folder: safetensors shards, ``config.json`` and tokenizer files."""
        model, _ = self._ready()
        s = self.settings
        hf_io.export(model, self._arch, self.model_dir, Path(folder), s.weights_dtype, s.shard_bytes)

    def state_digest(self) -> str:
        """sha256 over name and float32 bytes of every parameter, in name order."""
        digest = hashlib.sha256()
        for name, parameter in sorted(hf_io.named_parameters(self._ready()[0])):
            digest.update(name.encode())
            digest.update(hf_io.full_tensor(parameter).float().cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def get_config(self) -> dict[str, Any]:
        """Settings, model folder and device, JSON-able."""
        settings = dataclasses.asdict(self.settings)
        return {"model_dir": str(self.model_dir), "device": str(self.device), "threads": self.threads, **settings}

    def get_status(self) -> dict[str, Any]:
        """Where the trainer stands: ``ready``, ``step``, the next step's ``learning_rate``, ``has_gradients`` and, once
        ready, the number of ``parameters``."""
        status: dict[str, Any] = {
            "ready": self._model is not None,
            "step": self.step,
            "has_gradients": self._has_gradients,
        }
        status["learning_rate"] = learning_rate(self.step, self.settings)
        if self._model is not None:
            status["parameters"] = sum(p.numel() for p in self._ready()[0].parameters())
        return status

    def cleanup(self) -> None:
        """Free the model and the optimizer; ``setup`` starts afresh. The process group stays: others may share it."""
        self._model = self._optimizer = None
        self._has_gradients = False

    def _ready(self) -> tuple[Any, torch.optim.AdamW]:
        if self._model is None or self._optimizer is None:
            raise RuntimeError("the trainer has no model: call setup() first")
        self._reshard(self._model)
        return self._model, self._optimizer

    def _count(self, batches: Sequence[TextTrainBatch]) -> Totals:
        tokens = sum(int((batch.target_mask > 0).sum()) for batch in batches)
        return Totals(tokens, documents(batches), self.settings.horizon)


def _loss(
    model: Any,
    batch: TextTrainBatch,
    loss_fn: Loss,
    temperature: float,
    totals: Totals,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, dict[str, Any]]:
    """Loss and metrics of one micro-batch, on the device."""
    prepared = policy.prepare(batch, device, dtype)
    there = prepared.batch
    if hasattr(loss_fn, "from_logprobs"):
        logprobs_BT, entropy_BT = policy.logprobs(model, prepared, temperature)
        return loss_fn.from_logprobs(logprobs_BT, entropy_BT, there, totals)
    logits_BTV = policy.logits(model, prepared).float() / temperature
    loss, metrics = cast(LogitsLoss, loss_fn)(
        logits_BTV,
        there.target_ids,
        there.target_weights,
        there.generator_logprobs,
        there.target_mask,
        there.ref_logprobs,
    )
    share = len(prepared.index_N) / max(totals.tokens, 1)
    return loss * share, {n: value if is_maximum(n) else value * share for n, value in metrics.items()}

"""The trainer of a supervised run: as that of a GRPO run (``trainer_session.py``), on rows of the data loader.

Invariants: those of ``TrainerSession``; a validation changes nothing of the trainer's state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_core.algorithms.metrics import over_steps
from forge_core.runs.trainer_session import TrainerSession
from forge_core.store import File
from forge_core.training.packed_rows import PackedRows
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss

if TYPE_CHECKING:
    from forge_core.runs.sft_context import SftContext


@dataclass(frozen=True)
class SftStep:
    """Training step ``batch``: what it takes, the data loader knows."""

    batch: int


class SftTrainerSession(TrainerSession):
    def __init__(self, ctx: SftContext) -> None:
        super().__init__(ctx)
        self._sft = ctx

    def validate(self, version: int, rows: PackedRows) -> float:
        """The loss of ``version`` on ``rows``: nats per target token."""
        return self._call(self._validate, version, rows)

    def upload_adapter(self, prefix: str) -> tuple[File, ...]:
        """Upload the LoRA adapter below ``prefix``, as ``peft`` reads it."""
        return self._call(self._loaded().upload_adapter, prefix)

    def _validate(self, version: int, rows: PackedRows) -> float:
        self._at(version)
        found = self._loaded().logprobs_samples(rows, temperature=1.0, stop=self._sft.stop)
        return -sum(sum(document) for document in found) / rows.totals.tokens

    def _make_loss(self) -> Callable[[], Any]:
        return SFTLoss

    def _settings_of(self, config: Any) -> TrainerSettings:
        return TrainerSettings.of_sft(config)

    def _committed(self, entry: dict[str, Any]) -> SftStep:
        return SftStep(entry["batch"])

    def _step(self, data: Any) -> tuple[bool, dict[str, float]]:
        """All optimizer steps of one training step; the version is unknown while they run."""
        self._version = None
        metrics = [self._optimizer_step_on(rows) for rows in self._sft.rows.step(data.batch)]
        self._version = data.batch + 1
        return True, over_steps(metrics)

    def _optimizer_step_on(self, rows: PackedRows) -> dict[str, float]:
        result, step = self._loaded().train_samples(rows, totals=rows.totals, temperature=1.0, stop=self._sft.stop)
        norms = {"grad_norm": step.grad_norm, "grad_norm/max": step.grad_norm}
        return {"loss": result.loss, **result.metrics, **norms, "learning_rate": step.learning_rate}

    def _warn_of_mismatch(self, batch: int, metrics: dict[str, float]) -> None:
        """Nothing was sampled that could differ."""

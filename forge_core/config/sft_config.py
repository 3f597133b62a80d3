"""The configuration of a supervised run: one pydantic model, with the sections that it shares with a GRPO run.

Invariants:
- Unknown keys are refused; every field says what it is and in which unit.
- ``steps`` counts training steps as everywhere in Forge: each is ``training.sync_interval`` optimizer steps, ends with
  one ledger entry and makes one version of the weights.
- A *row* is ``training.seq_len`` tokens of packed documents.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from forge_core.config.alarm_sections import SftAlarmSection
from forge_core.config.engine_sections import CommSection, QuantizeSection, WeightsSection
from forge_core.config.metric_sections import MetricLoggingSection
from forge_core.config.optimizer_section import OptimizerSection
from forge_core.config.parallelism_section import ParallelismSection
from forge_core.config.run_config import CheckpointSection, GCSection, Model, ResumeSection, RunSection
from forge_core.config.section import Positive, Section
from forge_core.data.sft_settings import SftDataConfig

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class SftTrainingSection(OptimizerSection):
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of AdamW.")
    batch_size: Positive = Field(
        8,
        description="Rows per accumulation step, over all ranks; an optimizer step takes batch_size x "
        "gradient_accumulation_steps rows, in as many micro-batches of token_budget tokens as they need.",
    )
    gradient_accumulation_steps: Positive = Field(1, description="Accumulation steps per optimizer step.")
    sync_interval: Positive = Field(
        20, description="Optimizer steps per training step: each ends with a ledger entry and published weights."
    )
    seq_len: Positive = Field(2048, description="Tokens of a row, and of the longest document.")


class ValidationSection(Section):
    interval: int = Field(1, ge=0, description="Training steps between validations, and after the last; 0: none.")
    dataset: SftDataConfig | None = Field(
        None,
        description="What the loss is validated on. Left out: what dataset.holdout holds out; without it, nothing.",
    )
    rows: Positive = Field(64, description="Rows validated on, at most: always the same ones.")
    patience: int | None = Field(
        None, ge=1, description="Validations in a row without a lower loss that end the run. Left out: none do."
    )
    min_delta: float = Field(0.0, ge=0, description="By how much, in nats per token, a loss must be lower to count.")


class LoraSection(Section):
    """Train low-rank adapters and leave the model's own weights as they are."""

    rank: Positive = Field(16, description="Rank of the adapters.")
    alpha: float = Field(32.0, gt=0, description="The adapters' output is scaled by alpha / rank.")
    targets: list[Projection] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="Matrices that get an adapter; k_proj and v_proj go together.",
    )


class SftCheckpointSection(CheckpointSection):
    interval: int = Field(5, ge=0, description="Training steps between checkpoints; 0: only at the end.")


class SftServiceSection(Section):
    with_gpus: bool | None = Field(
        None,
        description="true: on GPUs, or the run is refused; false: on the CPU. Left out: on GPUs where the machine has "
        "any. How many: as the parallel degrees say.",
    )


class SftServicesSection(Section):
    trainer: SftServiceSection = Field(SftServiceSection(), description="The trainer.")


class SftConfig(Section):
    """Everything that decides a supervised run."""

    run: RunSection = Field(RunSection(), description="Name and seed.")
    store: str | None = Field(None, description="Root of the object store: a folder, file://, s3:// or memory:// URI.")
    steps: Positive = Field(50, description="Training steps, of training.sync_interval optimizer steps each.")
    model: Model | None = Field(
        None, description="Model folder, hub id (org/name or hf://org/name), or a small model made on the spot."
    )
    dataset: SftDataConfig | None = Field(None, description="Conversations to train on.")
    training: SftTrainingSection = Field(SftTrainingSection(), description="The optimizer step.")
    validation: ValidationSection = Field(ValidationSection(), description="Loss on held-out documents.")
    lora: LoraSection | None = Field(None, description="Train adapters instead of the whole model.")
    services: SftServicesSection = Field(SftServicesSection(), description="Where the trainer works.")
    parallelism: ParallelismSection = Field(ParallelismSection(), description="Ranks of the trainer.")
    comm: CommSection = Field(CommSection(), description="Communication of the trainer's ranks.")
    quantize: QuantizeSection = Field(QuantizeSection(), description="Low-precision training.")
    checkpoint: SftCheckpointSection = Field(SftCheckpointSection(), description="Checkpoints of the trainer.")
    weights: WeightsSection = Field(WeightsSection(), description="Published weights.")
    gc: GCSection = Field(GCSection(), description="Deleting what nothing reaches.")
    resume: ResumeSection = Field(ResumeSection(), description="Exactness of a resumed run.")
    metric_logging: MetricLoggingSection = Field(
        MetricLoggingSection(), description="Where metrics are shown besides the store."
    )
    alarms: SftAlarmSection = Field(
        SftAlarmSection(), description="When the run is worth a look; it goes on regardless."
    )

    @property
    def rows_per_optimizer_step(self) -> int:
        return self.training.batch_size * self.training.gradient_accumulation_steps

    @property
    def sequences_per_optimizer_step(self) -> int:
        """What a micro-batch is made of: rows."""
        return self.rows_per_optimizer_step

    @property
    def optimizer_steps(self) -> int:
        """Those of the whole run."""
        return self.steps * self.training.sync_interval

    @property
    def token_budget(self) -> int:
        return self.training.token_budget or max(self.training.seq_len, 16384)

    @property
    def weights_dtype(self) -> str:
        return self.weights.dtype or self.training.dtype

    @property
    def max_staleness(self) -> int:
        """Nothing is sampled, so nothing may be stale."""
        return 0

    @property
    def warm_start(self) -> None:
        """Version 0 is the model itself."""
        return None

    @property
    def validates(self) -> bool:
        held_out = self.validation.dataset is not None or (self.dataset is not None and self.dataset.holdout > 0)
        return self.validation.interval > 0 and held_out

    @model_validator(mode="after")
    def _ranks(self) -> SftConfig:
        self.parallelism.of_ranks(None)
        return self

    @model_validator(mode="after")
    def _cross_field(self) -> SftConfig:
        if self.validation.patience is not None and not self.validates:
            raise ValueError(
                f"validation.patience is {self.validation.patience}, but nothing is validated: hold out a share "
                "(dataset.holdout=0.02), name a set (validation.dataset.path=...), or leave patience out"
            )
        targets = set(self.lora.targets) if self.lora else set()
        if len(targets & {"k_proj", "v_proj"}) == 1:
            raise ValueError("lora.targets has one of k_proj and v_proj: give both, or neither")
        return self

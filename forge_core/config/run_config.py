"""The configuration of a run: one pydantic model.

Invariants:
- Unknown keys are refused everywhere (``extra="forbid"``); every field says what it is and in which unit.
- Class defaults are the base configuration: a file states only what differs.
- Loading and running are two gates: what can never be meant is refused here; what a run needs, in ``run_gate.py``.
- Nothing here loads an engine, a tokenizer or a data set.
- An *episode* is one prompt with one sampled response; a *group* is ``grpo.n_samples`` episodes of one prompt.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from forge_core.config.alarm_sections import AlarmSection
from forge_core.config.algorithm_sections import AdvantageSection, FilterSection, GRPOSection
from forge_core.config.data_sections import DatasetSection, ScratchModel, WarmStartSection
from forge_core.config.engine_sections import (
    CommSection,
    GeneratorSection,
    QuantizeSection,
    ServicesSection,
    WeightsSection,
)
from forge_core.config.loss_sections import GRPOLossSection, LossSection
from forge_core.config.metric_sections import MetricLoggingSection
from forge_core.config.optimizer_section import OptimizerSection
from forge_core.config.parallelism_section import ParallelismSection
from forge_core.config.reward_sections import RewardSection, all_rewards
from forge_core.config.rollout_sections import EnvironmentSection, EvalSection, RolloutSection
from forge_core.config.section import Fraction, Positive, Section


class RunSection(Section):
    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name of the run in the store: up to 100 letters, digits and any of . _ -, the first a letter or "
        "digit. Left out: made from the flow name and the time.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of data order, sampling and initial weights.")


class TrainingSection(OptimizerSection):
    batch_size: Positive = Field(
        64,
        description="Episodes per accumulation step; an optimizer step consumes batch_size x "
        "gradient_accumulation_steps episodes, which must be whole groups.",
    )
    gradient_accumulation_steps: Positive = Field(1, description="Accumulation steps per optimizer step.")
    sync_interval: Positive = Field(1, description="Optimizer steps per training step (weights are published once).")
    epochs_per_batch: Positive = Field(1, description="Passes over the episodes of an optimizer step.")
    seq_len: Positive = Field(2048, description="Longest prompt plus response, in tokens.")
    entropy_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the entropy bonus. Above 0, groups without signal are trained too: for the bonus (and "
        "the KL penalty) alone.",
    )


class RewardsSection(Section):
    functions: list[RewardSection] = Field([], description="Components; the reward is their weighted sum.")
    timeout_s: float = Field(30.0, gt=0, description="Seconds for one grade, after which the episode has no reward.")
    workers: int | None = Field(
        None,
        ge=1,
        description="Grading processes. Left out: as many as there are cores (16 at most), used when there is work for "
        "them; none when only built-in rewards that cannot hang are used.",
    )
    max_error_share: Fraction = Field(0.5, description="A shard with a larger share of failed grades is an error.")

    @property
    def paths(self) -> list[str]:
        """The paths of all rewards, those of the verifiers of an ensemble included."""
        return [function.path for function in all_rewards(self.functions)]


class CheckpointSection(Section):
    interval: int = Field(20, ge=0, description="Training steps between checkpoints; 0: only at the end.")
    keep: int = Field(2, ge=2, description="Complete checkpoints kept (two at least: one may be all a crash leaves).")


class GCSection(Section):
    grace: float = Field(3600.0, ge=0, description="Seconds that an unreachable object is kept.")


class ResumeSection(Section):
    max_drift: float = Field(1e-3, ge=0, description="Largest relative difference of inexactly replayed parameters.")


class RolesSection(Section):
    generators: Positive = Field(1, description="Generator roles that the coordinator starts, each with its engines.")
    scorers: Positive = Field(1, description="Scorer roles that the coordinator starts.")
    claim_timeout_s: float = Field(
        60.0, gt=0, description="Seconds without a heartbeat after which another process takes over a shard."
    )
    wait_s: float = Field(
        3600.0, gt=0, description="Seconds without anything new in the run after which a waiting role gives up."
    )
    stuck_s: float = Field(
        1800.0, gt=0, description="Seconds without a new object of a role that has work, after which it is restarted."
    )
    max_restarts: int = Field(
        5, ge=0, description="Restarts of one role without a new object of its own in between, at most."
    )


def _model_kind(value: Any) -> str:
    return "<section>" if isinstance(value, dict | ScratchModel) else "<name>"


# The tags keep pydantic from listing the errors of both alternatives; angle brackets cannot be part of a key.
Model = Annotated[Annotated[str, Tag("<name>")] | Annotated[ScratchModel, Tag("<section>")], Discriminator(_model_kind)]


class RunConfig(Section):
    """Everything that decides a GRPO run."""

    run: RunSection = Field(RunSection(), description="Name and seed.")
    store: str | None = Field(None, description="Root of the object store: a folder, file://, s3:// or memory:// URI.")
    steps: Positive = Field(100, description="Training steps.")
    max_staleness: int = Field(0, ge=0, description="Training steps that generation may run ahead; 0: on-policy.")
    model: Model | None = Field(
        None, description="Model folder, hub id (org/name or hf://org/name), or a small model made on the spot."
    )
    warm_start: WarmStartSection | None = Field(None, description="Supervised steps before version 0.")
    dataset: DatasetSection | None = Field(None, description="Prompts.")
    training: TrainingSection = Field(TrainingSection(), description="The optimizer step.")
    grpo: GRPOSection = Field(GRPOSection(), description="Groups, clipping, KL and temperature.")
    loss: LossSection = Field(GRPOLossSection(), description="Which policy loss.")
    advantage: AdvantageSection = Field(AdvantageSection(), description="Group advantages.")
    filters: FilterSection = Field(FilterSection(), description="Which episodes are trained on.")
    rollout: RolloutSection = Field(RolloutSection(), description="How responses are sampled.")
    environment: EnvironmentSection | None = Field(
        None, description="What answers the policy, turn after turn; left out: a response is one turn."
    )
    generator: GeneratorSection = Field(GeneratorSection(), description="The sampling engine.")
    rewards: RewardsSection = Field(RewardsSection(), description="How responses are graded.")
    services: ServicesSection = Field(ServicesSection(), description="Processes and GPUs per role.")
    parallelism: ParallelismSection = Field(ParallelismSection(), description="Ranks of the trainer.")
    comm: CommSection = Field(CommSection(), description="Communication of the trainer's ranks.")
    quantize: QuantizeSection = Field(QuantizeSection(), description="Low-precision training.")
    eval: EvalSection = Field(EvalSection(), description="Evaluation on held-out prompts.")
    checkpoint: CheckpointSection = Field(CheckpointSection(), description="Checkpoints of the trainer.")
    weights: WeightsSection = Field(WeightsSection(), description="Published weights.")
    gc: GCSection = Field(GCSection(), description="Deleting what nothing reaches.")
    resume: ResumeSection = Field(ResumeSection(), description="Exactness of a resumed run.")
    roles: RolesSection = Field(RolesSection(), description="A run on several machines, one process per role.")
    metric_logging: MetricLoggingSection = Field(
        MetricLoggingSection(), description="Where metrics are shown besides the store."
    )
    alarms: AlarmSection = Field(AlarmSection(), description="When the run is worth a look; it goes on regardless.")

    @property
    def episodes_per_optimizer_step(self) -> int:
        return self.training.batch_size * self.training.gradient_accumulation_steps

    @property
    def episodes_per_batch(self) -> int:
        """Episodes of one training step (prompts that are too long, and what ``filters`` replace, come on top)."""
        return self.training.sync_interval * self.episodes_per_optimizer_step

    @property
    def groups_per_batch(self) -> int:
        return self.episodes_per_batch // self.grpo.n_samples

    def groups_sampled(self, wanted: int, signal: float = 0.0) -> int:
        """How many groups a round samples for a batch that lacks ``wanted``; ``signal``: the share of them that is
        expected to have some (``filters.adaptive``), left out: as many groups as it may be."""
        most = self.filters.oversample
        return math.ceil(wanted * (min(most, 1 / signal) if self.filters.adaptive and signal > 0 else most))

    @property
    def groups_at_first(self) -> int:
        """Those of the first round of a batch, at most (``filters.adaptive``)."""
        return self.groups_sampled(self.groups_per_batch)

    @property
    def episodes_at_first(self) -> int:
        return self.groups_at_first * self.grpo.n_samples

    @property
    def sequences_per_optimizer_step(self) -> int:
        """What a micro-batch is made of: episodes."""
        return self.episodes_per_optimizer_step

    @property
    def optimizer_steps(self) -> int:
        """Those of the whole run."""
        return self.steps * self.training.sync_interval * self.training.epochs_per_batch

    @property
    def max_prompt_tokens(self) -> int:
        return self.rollout.max_prompt_tokens or self.training.seq_len - self.rollout.max_new_tokens

    @property
    def distils(self) -> bool:
        """Whether a teacher is learned from: then rewards only measure, and every episode is trained on."""
        return self.loss.name == "distill"

    @property
    def token_budget(self) -> int:
        return self.training.token_budget or max(self.training.seq_len, 16384)

    @property
    def weights_dtype(self) -> str:
        return self.weights.dtype or self.training.dtype

    @model_validator(mode="after")
    def _ranks(self) -> RunConfig:
        trainer = self.services.trainer
        procs = trainer.procs if "procs" in trainer.model_fields_set else None
        object.__setattr__(self, "parallelism", self.parallelism.of_ranks(procs))
        return self

    @model_validator(mode="after")
    def _cross_field(self) -> RunConfig:
        if self.grpo.beta > 0 and self.services.ref_model is None:
            raise ValueError(
                f"grpo.beta is {self.grpo.beta}, which needs a reference model, but services.ref_model is null: "
                "set grpo.beta=0, or leave services.ref_model out to get the default reference"
            )
        if self.loss.name == "dapo" and self.loss.adaptive_kl and self.grpo.beta == 0:
            raise ValueError(
                "loss.adaptive_kl is true, but it adapts the weight of the KL penalty from grpo.beta on, which is 0: "
                "set grpo.beta above 0, such as grpo.beta=0.01, or loss.adaptive_kl=false"
            )
        return self

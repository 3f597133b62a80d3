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
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from forge_core.config.alarm_sections import AlarmSection
from forge_core.config.loss_sections import GRPOLossSection, LossSection
from forge_core.config.metric_sections import MetricLoggingSection
from forge_core.config.optimizer_section import Dtype, OptimizerSection
from forge_core.config.parallelism_section import ParallelismSection
from forge_core.config.reward_sections import RewardSection, all_rewards
from forge_core.config.section import Fraction, Positive, Section


class RunSection(Section):
    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name of the run in the store: up to 100 letters, digits and any of . _ -, the first a letter or "
        "digit. Left out: made from the flow name and the time.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of data order, sampling and initial weights.")


class ScratchModel(Section):
    """A small model made on the spot, with random weights and a character tokenizer."""

    architecture: Literal["qwen3", "llama"] = Field("qwen3", description="Architecture of the transformer.")
    vocabulary: str = Field(description="The characters of the tokenizer, one token each (besides <pad> and <eos>).")
    hidden_size: Positive = Field(128, description="Width of the model.")
    intermediate_size: Positive = Field(384, description="Width of the feed-forward layers.")
    num_layers: Positive = Field(2, description="Number of transformer layers.")
    num_heads: Positive = Field(4, description="Attention heads.")
    num_kv_heads: Positive = Field(2, description="Key/value heads (grouped-query attention).")
    head_dim: Positive = Field(32, description="Width of one attention head.")
    max_position_embeddings: Positive = Field(256, description="Longest sequence, in tokens.")
    tie_word_embeddings: bool = Field(True, description="Whether input and output embeddings are one matrix.")
    initializer_range: float = Field(0.05, gt=0, description="Standard deviation of the initial weights.")


class CurriculumSection(Section):
    column: str = Field(
        description="Column (or dotted path into one) that states how hard a prompt is: a number, or text with one in "
        "it, such as Level 3."
    )
    descending: bool = Field(False, description="Larger numbers are easier, as of a pass rate.")
    levels: Positive = Field(10, description="Levels of difficulty, at most: of equal size, or one for each number.")
    epochs: Positive = Field(1, description="Epochs that go from easy to hard; later ones visit prompts in any order.")


class DatasetSection(Section):
    path: str = Field(
        description="Where prompts come from: a hub id (org/name or hf://org/name), a local JSONL, Parquet, CSV or "
        "dataset folder, a pattern of such files (data/*.jsonl), reasoning_gym://<task>, or python://<module or "
        "file.py>:<function>."
    )
    name: str | None = Field(None, description="Configuration name of a hub data set.")
    split: str = Field("train", description="Split to train on.")
    streaming: bool = Field(False, description="Stream a hub data set instead of downloading it first.")
    revision: str | None = Field(None, description="Revision of a hub data set.")
    options: dict[str, Any] = Field(
        {},
        description="Arguments of a reasoning_gym task or a python:// function. Of a pattern: files, the list of those "
        "to read (left out: all that match).",
    )
    prompt_column: str | None = Field(None, description="Column of the prompt (text or chat messages).")
    answer_column: str | None = Field(None, description="Column of the ground truth.")
    system_prompt: str | None = Field(None, description="System message put before each prompt.")
    prompt_template: str = Field("{prompt}", description="Text of the user message; {prompt} is the prompt column.")
    chat_template: bool | None = Field(
        None, description="Apply the tokenizer's chat template. Left out: exactly when the tokenizer has one."
    )
    size: int | None = Field(None, ge=1, description="Use only the first rows. Left out: all.")
    shuffle: bool = Field(True, description="Visit prompts in a new seeded order each epoch.")
    curriculum: CurriculumSection | None = Field(None, description="Visit easy prompts first. Left out: in any order.")


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


class GRPOSection(Section):
    n_samples: Positive = Field(8, description="Responses sampled per prompt (the group size).")
    clip_low: float = Field(0.2, ge=0, description="Ratio is clipped at 1 - clip_low.")
    clip_high: float = Field(0.28, ge=0, description="Ratio is clipped at 1 + clip_high.")
    beta: float = Field(0.1, ge=0, description="Weight of the KL penalty to the reference model; 0: no reference.")
    temperature: float = Field(1.0, ge=0, le=10, description="Sampling temperature.")


Estimator = Literal["group", "leave_one_out", "max_rl", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


class AdvantageSection(Section):
    estimator: Estimator = Field(
        "group",
        description="group: reward minus the group's mean; leave_one_out: minus the mean of the others (RLOO); "
        "max_rl: minus the mean and divided by it (MaxRL, rewards from 0 up); reinforce_plus_plus: the reward, "
        "whitened over the tokens of the batch; reinforce_plus_plus_baseline: minus the group's mean first.",
    )
    normalize: bool = Field(True, description="group: divide by the standard deviation (false: Dr. GRPO).")
    eps: float = Field(1e-4, ge=0, description="group: added to the standard deviation.")


class FilterSection(Section):
    dynamic_sampling: bool = Field(
        False, description="Drop groups whose rewards are all equal and refill the batch with other prompts (DAPO)."
    )
    max_rounds: int = Field(
        3, ge=0, description="Extra rounds of rollouts to refill one batch, at most; 0: train with what the first gave."
    )
    oversample: float = Field(
        1.0,
        ge=1,
        le=64,
        description="Prompts sampled in every round, as a multiple of the groups that the batch still lacks: one large "
        "round is faster than several small ones. Above 1 needs dynamic_sampling.",
    )
    truncated: Literal["keep", "mask", "zero_advantage"] = Field(
        "keep",
        description="Episodes cut at max_new_tokens: keep: train as they are; mask: drop from the loss and its "
        "denominators; zero_advantage: count their tokens, with advantage 0.",
    )


class RolloutSection(Section):
    version: Literal["newest", "oldest"] = Field(
        "newest",
        description="newest: sample with the newest committed version; oldest: batch b exactly with version "
        "max(0, b - max_staleness), which makes a CPU run reproducible bit for bit.",
    )
    max_new_tokens: Positive = Field(
        128,
        description="Tokens per response, at most; with an environment those of all turns and of what it answers.",
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longer prompts are dropped, with the reason. Left out: seq_len - max_new_tokens."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; below 1 needs allow_truncated_sampling.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: all.")
    min_p: Fraction = Field(0.0, description="Drop tokens below this share of the likeliest token's probability.")
    allow_truncated_sampling: bool = Field(False, description="Accept the biased ratio that truncation brings.")
    shards: int | None = Field(
        None, ge=1, description="Rollout tasks per batch. Left out: one per generator role, or four per vLLM engine."
    )
    deadline_s: float = Field(3600.0, gt=0, description="Seconds after which unfinished episodes are dropped.")


class EnvironmentSection(Section):
    """Episodes of several turns: what answers the policy."""

    path: str = Field(description="<module>:<name>, <file.py>:<name>, or the name of a built-in environment.")
    options: dict[str, Any] = Field({}, description="Arguments of the environment class.")
    max_turns: Positive = Field(8, description="Turns of the policy in an episode, at most.")
    max_turn_tokens: int | None = Field(
        None, ge=1, description="Sampled tokens of a turn, at most. Left out: what rollout.max_new_tokens leaves."
    )
    turn_timeout_s: float = Field(
        60.0, gt=0, description="Seconds that the environment has for an answer; then the episode is dropped."
    )
    workers: Positive = Field(16, description="Environments of a rollout shard that work at a time, in threads.")
    max_open: Positive | None = Field(
        None,
        description="Environments of a rollout shard that are open at a time, such as sessions of a server: a vLLM "
        "engine samples up to four shards at a time. Left out: one for each episode.",
    )
    max_broken_share: Fraction = Field(
        0.5, description="A shard with a larger share of broken environments is an error: an outage is no data."
    )
    tool_format: Literal["auto", "hermes", "qwen_coder", "llama", "mistral", "text"] = Field(
        "auto", description="How the model writes tool calls; auto: as its chat template teaches it."
    )
    tool_pattern: str | None = Field(
        None, description="tool_format=text: a regular expression; its named groups are the arguments of the call."
    )


class GeneratorSection(Section):
    backend: Literal["hf", "vllm"] = Field(
        "hf", description="hf: transformers in this process; vllm: vLLM engines in child processes (extra vllm)."
    )
    dtype: Dtype = Field("float32", description="Type of the generator's weights.")
    max_batch: Positive = Field(512, description="Sequences decoded together, at most (embedded backend).")
    threads: int | None = Field(None, ge=1, description="CPU threads of the generator. Left out: its share of cores.")
    engine_args: dict[str, Any] = Field(
        {}, description="Arguments of vLLM's engine, such as max_num_seqs or gpu_memory_utilization, passed through."
    )
    sampling_params: dict[str, Any] = Field(
        {}, description="Further sampling parameters of vLLM, such as stop_token_ids, passed through."
    )
    weight_update: Literal["in_flight", "drain"] = Field(
        "in_flight",
        description="in_flight: unfinished responses of vLLM go on with the new weights; drain: they finish first.",
    )
    sharing: Literal["sleep", "split"] = Field(
        "sleep",
        description="sleep: on the trainer's GPU vLLM's memory is freed while the trainer works; split: both keep "
        "their share (generator.engine_args.gpu_memory_utilization).",
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


class ServiceSection(Section):
    procs: Positive = Field(
        1,
        description="GPUs of one replica: the tensor-parallel degree of a vLLM engine. The trainer has as many as its "
        "parallel degrees say.",
    )
    num_replicas: Positive = Field(1, description="Engines of the generator (vLLM).")
    with_gpus: bool | None = Field(
        None,
        description="true: on GPUs, or the run is refused; false: on the CPU. Left out: on GPUs where the machine has "
        "any. On a machine with one GPU the roles share it, and the reference may share the trainer's.",
    )


class ServicesSection(Section):
    generator: ServiceSection = Field(ServiceSection(), description="The sampling engine.")
    trainer: ServiceSection = Field(ServiceSection(), description="The trainer.")
    ref_model: ServiceSection | None = Field(
        ServiceSection(), description="The frozen reference model; null: none (needs grpo.beta=0)."
    )


class CommSection(Section):
    init_timeout_s: float = Field(600.0, gt=0, description="Seconds that the trainer's ranks have to find each other.")
    timeout_s: float = Field(300.0, gt=0, description="Seconds after which a collective of the trainer has failed.")


class QuantizeSection(Section):
    float8: bool = Field(False, description="Matrix products of the trainer's layers in float8, where the GPU has it.")


class EvalSection(Section):
    interval: int = Field(0, ge=0, description="Training steps between evaluations; 0: only before and after.")
    prompts: int = Field(256, ge=0, description="Held-out prompts per evaluation; 0: no evaluation.")
    holdout: float = Field(0.1, ge=0, lt=1, description="Share of prompts held out, chosen by a hash of the prompt.")
    split: str | None = Field(None, description="Evaluate on this split instead of held-out training prompts.")
    temperature: float = Field(1.0, ge=0, le=10, description="Sampling temperature of the evaluation; 0: greedy.")
    samples: Positive = Field(1, description="Responses sampled per held-out prompt.")


class CheckpointSection(Section):
    interval: int = Field(20, ge=0, description="Training steps between checkpoints; 0: only at the end.")
    keep: int = Field(2, ge=2, description="Complete checkpoints kept (two at least: one may be all a crash leaves).")


class WeightsSection(Section):
    dtype: Dtype | None = Field(None, description="Type of published weights. Left out: training.dtype.")
    keep: int = Field(2, ge=1, description="Newest versions kept besides those that the run still needs.")
    shard_bytes: int = Field(2_000_000_000, ge=1, description="Largest safetensors file, in bytes.")
    prefetch: bool = Field(True, description="Fetch new weights to the host's shared memory while generation goes on.")
    fetchers: Positive = Field(8, description="Parallel range reads that fetch one version of the weights.")


class GCSection(Section):
    grace: float = Field(3600.0, ge=0, description="Seconds that an unreachable object is kept.")


class ResumeSection(Section):
    max_drift: float = Field(1e-3, ge=0, description="Largest relative difference of inexactly replayed parameters.")


class RolesSection(Section):
    generators: Positive = Field(1, description="Generator roles that the coordinator starts, each with its engines.")
    scorers: Positive = Field(1, description="Scorer roles that the coordinator starts.")
    claim_timeout_s: float = Field(
        60.0, gt=0, description="Seconds without a heartbeat after which another generator takes over a shard."
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


class WarmStartSection(Section):
    """Supervised steps before version 0."""

    dataset: DatasetSection = Field(description="Demonstrations: prompt_column and answer_column are trained on.")
    steps: Positive = Field(300, description="Optimizer steps.")
    batch_size: Positive = Field(96, description="Demonstrations per step.")
    learning_rate: float = Field(2e-3, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(50, ge=0, description="Steps of linear warm-up, then cosine to 10 %.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")


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

    def groups_sampled(self, wanted: int) -> int:
        """How many groups a round samples for a batch that lacks ``wanted``."""
        return math.ceil(wanted * self.filters.oversample)

    @property
    def episodes_sampled(self) -> int:
        """Those of the first round of a batch."""
        return self.groups_sampled(self.groups_per_batch) * self.grpo.n_samples

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

"""How a trainer steps: what supervised training and reinforcement learning have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forge_core.config.section import Fraction, Section

Dtype = Literal["float32", "bfloat16"]
Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    lr_decay: Literal["constant", "linear", "cosine"] = Field("constant", description="Schedule after the warm-up.")
    lr_min_ratio: Fraction = Field(0.0, description="Final learning rate as a share of the peak (linear, cosine).")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of AdamW.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="Moment decay rates of AdamW.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    max_norm: float = Field(1.0, gt=0, description="Gradient clipping: largest total L2 norm.")
    token_budget: int | None = Field(
        None,
        ge=1,
        description="Tokens of one packed micro-batch. Left out: the larger of seq_len and 16384. A GPU computes all "
        "of it, or a half, a quarter or an eighth of it where that holds a whole step.",
    )
    dtype: Dtype = Field("float32", description="Compute type; master weights are float32.")
    threads: int | None = Field(None, ge=1, description="CPU threads of the trainer. Left out: its share of the cores.")
    own_process: bool = Field(
        False,
        description="Train in a process of its own with one rank too, as several ranks always do: what else the run's "
        "process does, such as sampling and scoring of a GRPO run, then does not slow optimizer steps.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none", description="Activations computed again in the backward pass: none, those of cheap operations, or all."
    )
    compile: bool = Field(False, description="Compile the trainer's layers with torch.compile.")

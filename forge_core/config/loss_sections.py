"""The section ``loss``: one model a policy loss, told apart by ``name``, each with its own parameters.

Invariants: clip_low and clip_high that are left out are those of ``grpo`` where the loss clips a token's ratio around
1 (grpo, dapo, rloo); losses that bound something else have their papers' values. The weight of the KL penalty is
``grpo.beta`` and that of the entropy bonus ``training.entropy_coef``, whatever the loss.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from forge_core.config.section import Section, kind

AggType = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_horizon"]
_AGG = "How token losses become one number (denominators are global over the step)."
_LOW = "Ratio is clipped at 1 - clip_low. Left out: grpo.clip_low."
_HIGH = "Ratio is clipped at 1 + clip_high. Left out: grpo.clip_high."
_CORRECTION = "Which correction for a sampler that is not the trained policy."


class _Bounds(Section):
    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> _Bounds:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}, which leaves nothing")
        return self


class TruncatedCorrection(_Bounds):
    """Truncated importance sampling."""

    name: Literal["truncated"] = Field(description=_CORRECTION)
    level: Literal["token", "sequence"] = Field("token", description="A token's own ratio, or its sequence's product.")
    low: float = Field(0.0, ge=0, description="truncated: smallest weight.")
    high: float = Field(2.0, gt=0, description="truncated: largest weight.")


class IcePopCorrection(_Bounds):
    """Tokens on which sampler and trainer disagree are left out."""

    name: Literal["icepop"] = Field(description=_CORRECTION)
    low: float = Field(0.5, ge=0, description="icepop: smallest ratio kept.")
    high: float = Field(5.0, gt=0, description="icepop: largest ratio kept.")


class SequenceMaskCorrection(_Bounds):
    """Sequences whose geometric-mean ratio is out of bounds are left out."""

    name: Literal["sequence_mask"] = Field(description=_CORRECTION)
    low: float = Field(0.99, ge=0, description="sequence_mask: smallest geometric-mean ratio kept.")
    high: float = Field(1.01, gt=0, description="sequence_mask: largest geometric-mean ratio kept.")
    weight: Literal["token", "geometric"] = Field("token", description="Weights of the kept tokens.")


Correction = Annotated[
    Annotated[TruncatedCorrection, Tag("<truncated>")]
    | Annotated[IcePopCorrection, Tag("<icepop>")]
    | Annotated[SequenceMaskCorrection, Tag("<sequence_mask>")],
    Discriminator(kind("truncated")),
]


class AnyLoss(Section):
    mismatch_alarm: float | None = Field(
        None, gt=0, description="Warn when sampler and trainer log-probabilities differ by more nats per token (mean)."
    )


class PolicyLossSection(AnyLoss):
    kl_type: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = Field("k3", description="Estimator of the KL penalty.")


class CorrectedSection(PolicyLossSection):
    correction: Correction | None = Field(
        None, description="Correction for off-policy samples: ratios are then against the step's first policy."
    )


class GRPOLossSection(CorrectedSection):
    """Clipped policy gradient (arXiv 2402.03300); Dr. GRPO with agg_type fixed_horizon."""

    name: Literal["grpo"] = Field("grpo", description="Policy loss.")
    clip_low: float | None = Field(None, ge=0, description=_LOW)
    clip_high: float | None = Field(None, ge=0, description=_HIGH)
    agg_type: AggType = Field("token_mean", description=_AGG)


class DAPOLossSection(CorrectedSection):
    """Clip-higher with a dual clip (arXiv 2503.14476)."""

    name: Literal["dapo"] = Field(description="Policy loss.")
    clip_low: float | None = Field(None, ge=0, description=_LOW)
    clip_high: float | None = Field(None, ge=0, description=_HIGH)
    dual_clip: float | None = Field(3.0, gt=1, description="Bad tokens cost at most this times -A; null: no bound.")
    adaptive_kl: bool = Field(False, description="Steer the KL weight, from grpo.beta on, towards kl_target.")
    kl_target: float = Field(0.1, gt=0, description="KL to the reference to aim at, in nats per token.")
    agg_type: AggType = Field("token_mean", description=_AGG)


class CISPOLossSection(CorrectedSection):
    """Clipped importance weights (arXiv 2506.13585)."""

    name: Literal["cispo"] = Field(description="Policy loss.")
    clip_low: float = Field(1.0, ge=0, description="cispo: weights are clipped at 1 - clip_low.")
    clip_high: float = Field(4.0, ge=0, description="cispo: weights are clipped at 1 + clip_high.")
    agg_type: AggType = Field("token_mean", description=_AGG)


class GSPOLossSection(CorrectedSection):
    """One ratio a sequence (arXiv 2507.18071)."""

    name: Literal["gspo"] = Field(description="Policy loss.")
    variant: Literal["token", "sequence"] = Field(
        "token", description="Gradient of each token's own log-probability, or of the sequence's mean ratio."
    )
    clip_low: float = Field(3e-4, ge=0, description="gspo: sequence ratio is clipped at 1 - clip_low.")
    clip_high: float = Field(4e-4, ge=0, description="gspo: sequence ratio is clipped at 1 + clip_high.")
    agg_type: AggType = Field("sequence_mean", description=_AGG)


class SAPOLossSection(CorrectedSection):
    """Soft gate instead of a clip (arXiv 2511.20347)."""

    name: Literal["sapo"] = Field(description="Policy loss.")
    tau_pos: float = Field(1.0, gt=0, description="Temperature of the gate where the advantage is positive.")
    tau_neg: float = Field(1.05, gt=0, description="Temperature of the gate elsewhere.")
    agg_type: AggType = Field("sequence_mean", description=_AGG)


class GMPOLossSection(CorrectedSection):
    """Geometric mean of clipped ratios (arXiv 2507.20673)."""

    name: Literal["gmpo"] = Field(description="Policy loss.")
    clip_low: float = Field(0.4, ge=0, description="gmpo: log-ratio is clipped at -clip_low.")
    clip_high: float = Field(0.4, ge=0, description="gmpo: log-ratio is clipped at clip_high.")
    agg_type: AggType = Field("sequence_mean", description=_AGG)


class RLOOLossSection(CorrectedSection):
    """Clipped ratio of whole sequences (arXiv 2402.14740)."""

    name: Literal["rloo"] = Field(description="Policy loss.")
    clip_low: float | None = Field(None, ge=0, description=_LOW)
    clip_high: float | None = Field(None, ge=0, description=_HIGH)
    agg_type: AggType = Field("sequence_mean", description=_AGG)


class ReinforceLossSection(PolicyLossSection):
    """REINFORCE with a bounded importance weight."""

    name: Literal["reinforce"] = Field(description="Policy loss.")
    weight_min: float = Field(0.1, ge=0, description="Smallest importance weight.")
    weight_max: float = Field(10.0, gt=0, description="Largest importance weight; both bounds 1: no weight.")
    agg_type: AggType = Field("token_mean", description=_AGG)


class DPPOLossSection(PolicyLossSection):
    """Trust region on probabilities (arXiv 2602.04879)."""

    name: Literal["dppo"] = Field(description="Policy loss.")
    mask_low: float = Field(0.2, ge=0, le=1, description="Largest fall of a token's probability.")
    mask_high: float = Field(0.2, ge=0, le=1, description="Largest rise of a token's probability.")
    two_sided: bool = Field(False, description="Leave out tokens beyond either bound, whatever their advantage.")
    ratio_cap: float | None = Field(None, gt=0, description="Largest ratio, as a weight without gradient; null: none.")
    drift_coef: float = Field(0.0, ge=0, description="Weight of the squared log-ratio to the sampler.")
    agg_type: AggType = Field("token_mean", description=_AGG)


class DistillLossSection(AnyLoss):
    """On-policy distillation: reverse KL to a teacher on the policy's own samples."""

    name: Literal["distill"] = Field(description="Policy loss.")
    teacher: str | None = Field(
        None,
        description="distill: model folder, hub id or run://RUN_ID/VERSION with the policy's tokenizer; it takes the "
        "place of the reference model.",
    )
    max_gap: float = Field(
        10.0, gt=0, description="distill: a token's log-probabilities by teacher and sampler differ by this, at most."
    )
    weight_max: float = Field(2.0, gt=0, description="distill: largest importance weight.")
    agg_type: AggType = Field("token_mean", description=_AGG)


class CustomLossSection(AnyLoss):
    """A loss in the user's own file."""

    name: Literal["custom"] = Field(description="Policy loss.")
    path: str = Field(description="The loss: <file.py>:<name> or <module>:<name>, a class or a function.")
    options: dict[str, Any] = Field({}, description="Arguments of the class or function.")


LossSection = Annotated[
    Annotated[GRPOLossSection, Tag("<grpo>")]
    | Annotated[DAPOLossSection, Tag("<dapo>")]
    | Annotated[CISPOLossSection, Tag("<cispo>")]
    | Annotated[GSPOLossSection, Tag("<gspo>")]
    | Annotated[SAPOLossSection, Tag("<sapo>")]
    | Annotated[GMPOLossSection, Tag("<gmpo>")]
    | Annotated[RLOOLossSection, Tag("<rloo>")]
    | Annotated[ReinforceLossSection, Tag("<reinforce>")]
    | Annotated[DPPOLossSection, Tag("<dppo>")]
    | Annotated[DistillLossSection, Tag("<distill>")]
    | Annotated[CustomLossSection, Tag("<custom>")],
    Discriminator(kind("grpo")),
]

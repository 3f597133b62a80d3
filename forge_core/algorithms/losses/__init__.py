"""Policy losses, one a file. ``build_loss`` makes the one that a configuration names.

All are called alike: ``loss(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs)`` for a whole
batch, or ``loss.from_logprobs(logprobs, entropy, batch, totals)`` for a packed micro-batch (see ``base.py``).
"""

from __future__ import annotations

from typing import Any

from forge_core.algorithms.corrections import Correction, IcePop, SequenceMask, TruncatedIS
from forge_core.algorithms.losses.base import PolicyLoss
from forge_core.algorithms.losses.cispo import CISPOLoss
from forge_core.algorithms.losses.custom import CustomLoss, load_custom_loss
from forge_core.algorithms.losses.dapo import DAPOLoss
from forge_core.algorithms.losses.distill import DistillLoss
from forge_core.algorithms.losses.dppo import DPPOLoss
from forge_core.algorithms.losses.gmpo import GMPOLoss
from forge_core.algorithms.losses.grpo import GRPOLoss
from forge_core.algorithms.losses.gspo import GSPOLoss
from forge_core.algorithms.losses.probe import probe
from forge_core.algorithms.losses.reinforce import ReinforceLoss
from forge_core.algorithms.losses.rloo import RLOOLoss
from forge_core.algorithms.losses.sapo import SAPOLoss
from forge_core.config.loss_sections import CustomLossSection
from forge_core.config.run_config import RunConfig

LOSSES: dict[str, type[PolicyLoss]] = {
    "grpo": GRPOLoss,
    "dapo": DAPOLoss,
    "cispo": CISPOLoss,
    "gspo": GSPOLoss,
    "sapo": SAPOLoss,
    "gmpo": GMPOLoss,
    "rloo": RLOOLoss,
    "reinforce": ReinforceLoss,
    "dppo": DPPOLoss,
    "distill": DistillLoss,
}
CORRECTIONS: dict[str, type] = {"truncated": TruncatedIS, "icepop": IcePop, "sequence_mask": SequenceMask}


def build_loss(config: RunConfig) -> PolicyLoss | CustomLoss:
    """The policy loss of ``config``. Raises ConfigError when a custom loss cannot be made."""
    section = config.loss
    loss: PolicyLoss | CustomLoss
    if isinstance(section, CustomLossSection):
        loss = load_custom_loss(section.path, section.options)
    else:
        loss = LOSSES[section.name](**_arguments(config))
    loss.mismatch_alarm = section.mismatch_alarm
    return loss


def check_loss(config: RunConfig) -> None:
    """Make the policy loss of ``config``, and call one that states a formula of the user's own. Raises ConfigError."""
    loss = build_loss(config)
    if isinstance(config.loss, CustomLossSection) and isinstance(loss, PolicyLoss):
        probe(loss, config.loss.path)


def _arguments(config: RunConfig) -> dict[str, Any]:
    """The section's values by name; clips that are left out are those of ``grpo``."""
    values = config.loss.model_dump(exclude={"name", "mismatch_alarm", "teacher"})
    for clip in ("clip_low", "clip_high"):
        if clip in values and values[clip] is None:
            values[clip] = getattr(config.grpo, clip)
    if correction := values.get("correction"):
        values["correction"] = CORRECTIONS[correction.pop("name")](**correction)
    return values | {"beta": config.grpo.beta, "entropy_coef": config.training.entropy_coef}


__all__ = [
    "CORRECTIONS",
    "LOSSES",
    "CISPOLoss",
    "Correction",
    "CustomLoss",
    "DAPOLoss",
    "DPPOLoss",
    "DistillLoss",
    "GMPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "IcePop",
    "PolicyLoss",
    "RLOOLoss",
    "ReinforceLoss",
    "SAPOLoss",
    "SequenceMask",
    "TruncatedIS",
    "build_loss",
    "check_loss",
]

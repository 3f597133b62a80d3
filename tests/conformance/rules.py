"""Which vectors our conventions deliberately do not reproduce: each rule names its row of ``not_adopted.md``.

A rule looks at the algorithm, the peer, the parameters and the inputs, and holds only where the difference shows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from forge_core.algorithms.advantages import has_signal
from forge_core.algorithms.ops import MAX_LOG_RATIO, sequence_mean
from tests.conformance import policy
from tests.conformance.numbers import tensor

Vector = dict[str, Any]

UNCLAMPED = ("trl", "AReaL", "prime-rl")  # and one function of SkyRL
BOUNDED_ANYWAY = ("dual-clip", "two-sided", "sapo", "gspo", "gmpo", "dppo", "prime-rl", "rloo")


def why_not(vector: Vector) -> str | None:
    """The first rule that holds."""
    return next((name for name, holds in RULES.items() if holds(vector)), None)


def _log_ratio_clamp(v: Vector) -> bool:
    """A token's log-ratio beyond +-20 decides the value, and the peer does not clamp it."""
    name = v["algorithm"].lower()
    unclamped = v["peer"] in UNCLAMPED or "unclipped" in name
    if "logprobs" not in v["inputs"] or "advantages" not in v["inputs"] or not unclamped:
        return False
    per_token_too = v["peer"] == "AReaL" and name.startswith(("dual-clip", "sapo"))
    if name.startswith(BOUNDED_ANYWAY) and not per_token_too:
        return False
    c = _case(v)
    beyond = (c.mask > 0) & ((c.logprobs - c.anchor).abs() > MAX_LOG_RATIO)
    correction = policy.correction(c)
    if correction is not None and c.behaviour is not None:
        beyond &= correction.weights(c.anchor, c.behaviour, c.mask) > 0
    return bool(beyond.any())


def _sequence_ratio_clamp(v: Vector) -> bool:
    """verl and SkyRL cap GSPO's log-ratio of a sequence at 10, we at 20."""
    if not v["algorithm"].startswith("GSPO") or v["peer"] not in ("verl", "SkyRL"):
        return False
    c = _case(v)
    return bool((sequence_mean(c.logprobs - c.anchor, c.mask) > 10.0).any())


def _summed_ratio_clamp(v: Vector) -> bool:
    """TRL's sequence ratio is exp of the sum, unclamped."""
    if not v["algorithm"].startswith("RLOO (sequence"):
        return False
    c = _case(v)
    return bool((((c.logprobs - c.anchor) * c.mask).sum(1).abs() > MAX_LOG_RATIO).any())


def _kl_clamp(v: Vector) -> bool:
    """k3 of a difference beyond +-20, neither clamped before nor after it is taken."""
    if "ref_logprobs" not in v["inputs"]:
        return False
    k3 = v["params"].get("estimator") == "k3" and v["params"].get("apply_clamp") is False
    in_loss = v["peer"] in ("trl", "torchforge") and v["params"].get("beta", 0) > 0
    mask = tensor(v["inputs"].get("mask", v["inputs"].get("padding_mask", 1.0)))
    gap = (tensor(v["inputs"]["ref_logprobs"]) - tensor(v["inputs"]["logprobs"])).abs()
    return (k3 or in_loss) and bool(((gap > MAX_LOG_RATIO) & (mask > 0)).any())


def _sapo_sequence_gate(v: Vector) -> bool:
    """AReaL's gate on the ratio of a sequence, which the paper does not have; on-policy all gates are one."""
    if not v["algorithm"].startswith("SAPO (sequence"):
        return False
    c = _case(v)
    return not torch.equal(c.logprobs * c.mask, c.anchor * c.mask)


def _rloo_empty_row(v: Vector) -> bool:
    """TRL adds -A of a row without tokens to the value of the loss."""
    return v["algorithm"].startswith("RLOO (sequence") and bool((tensor(v["inputs"]["mask"]).sum(1) == 0).any())


def _single_z_score(v: Vector) -> bool:
    """verl divides the reward of a group of one by 1 + eps; we keep it."""
    exact = v["peer"] == "verl" and (v["algorithm"] == "grpo-std" or "ddof" in v["params"])
    return exact and v["params"].get("norm_by_std", True) and _has_single(v)


def _single_rloo(v: Vector) -> bool:
    """verl's two functions differ for a group of one, and a vector does not say which one it is of."""
    return v["peer"] == "verl" and v["algorithm"] == "RLOO" and _has_single(v)


def _max_rl_negative_mean(v: Vector) -> bool:
    """SkyRL divides by a mean that may be negative, which turns the sign of every advantage of the group."""
    if v["algorithm"] != "MaxRL" or v["peer"] != "SkyRL":
        return False
    pairs = list(zip(v["inputs"]["group_index"], v["inputs"]["rewards"], strict=True))
    groups = [[reward for group, reward in pairs if group == wanted] for wanted in {group for group, _ in pairs}]
    return any(len(g) > 1 and sum(g) <= 0 and has_signal(g) for g in groups)


def _has_single(v: Vector) -> bool:
    return "group_index" in v["inputs"] and 1 in Counter(v["inputs"]["group_index"]).values()


def _overlong_beyond(v: Vector) -> bool:
    """verl and AReaL go on below -factor beyond the longest length."""
    if v["algorithm"] != "DAPO soft overlong punishment" or v["peer"] not in ("verl", "AReaL"):
        return False
    return max(v["inputs"]["lengths"]) > v["params"]["max_len"]


def _filter_single(v: Vector) -> bool:
    """SkyRL and verl keep a group of one, which has no advantage here."""
    return _is_filter(v, "SkyRL", "verl") and any(len(g["rewards"]) == 1 for g in v["inputs"]["groups"])


def _filter_rounding(v: Vector) -> bool:
    """SkyRL's tolerance is absolute and chosen by the user; ours is rounding."""
    return _is_filter(v, "SkyRL") and v["params"]["tol"] > 0


def _filter_mean_range(v: Vector) -> bool:
    """OpenRLHF keeps by the mean of a group, even a group whose rewards are all equal."""
    return _is_filter(v, "OpenRLHF")


def _is_filter(v: Vector, *peers: str) -> bool:
    return v["algorithm"] == "dynamic-sampling filter" and v["peer"] in peers


def _rewards(v: Vector) -> bool:
    return "gold" in v["inputs"] or v["algorithm"] == "MathReward"


@torch.no_grad()
def _case(v: Vector) -> policy.Case:
    return policy.case(v["peer"], v["algorithm"], v["inputs"], v["params"])


RULES = {
    "graded elsewhere": _rewards,
    "SAPO sequence gate": _sapo_sequence_gate,
    "log-ratio clamp": _log_ratio_clamp,
    "sequence log-ratio clamp": _sequence_ratio_clamp,
    "summed log-ratio clamp": _summed_ratio_clamp,
    "k3 clamp": _kl_clamp,
    "RLOO empty row": _rloo_empty_row,
    "z-score of one": _single_z_score,
    "leave-one-out of one": _single_rloo,
    "MaxRL negative mean": _max_rl_negative_mean,
    "overlong beyond the limit": _overlong_beyond,
    "filter keeps one": _filter_single,
    "filter tolerance": _filter_rounding,
    "filter by mean": _filter_mean_range,
}

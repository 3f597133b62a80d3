"""Policy losses of the vectors: a peer's name and parameters to one of our losses, and its denominators."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_core.algorithms.corrections import Correction, IcePop, SequenceMask, TruncatedIS
from forge_core.algorithms.losses import (
    CISPOLoss,
    DAPOLoss,
    DPPOLoss,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyLoss,
    ReinforceLoss,
    RLOOLoss,
    SAPOLoss,
)
from forge_core.algorithms.losses.grpo import clipped_policy_gradient
from forge_core.algorithms.ops import Totals, aggregate, compute_kl, sequence_mean
from forge_core.data_model import TextTrainBatch
from tests.conformance.numbers import number, tensor

Params = dict[str, Any]


@dataclass
class Case:
    """One vector: tensors ``[B, T]``, and the peer's parameters."""

    peer: str
    algorithm: str
    params: Params
    logprobs: Tensor
    anchor: Tensor
    mask: Tensor
    advantages: Tensor
    ref: Tensor | None
    behaviour: Tensor | None = None


def case(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> Case:
    """``anchor``: what the ratio is taken against; ``behaviour``: the sampler, where that is another policy."""
    given = {name: tensor(value) for name, value in inputs.items()}
    logprobs, mask = given["logprobs"], given["mask" if "mask" in given else "padding_mask"]
    old, rollout = given.get("old_logprobs"), given.get("rollout_logprobs")
    anchor = old if old is not None else rollout if rollout is not None else logprobs.clone()
    behaviour = rollout if old is not None else None
    ratio = given.get("importance_sampling_ratio")
    if ratio is not None:  # TRL is given the weight itself
        behaviour = anchor - ratio.expand_as(mask).log()
    advantages = given["advantages"].expand_as(mask)
    return Case(
        peer,
        algorithm,
        params,
        logprobs.requires_grad_(),
        anchor,
        mask,
        advantages,
        given.get("ref_logprobs"),
        behaviour,
    )


def policy_loss(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    c = case(peer, algorithm, inputs, params)
    loss_fn = build(c)
    batch = TextTrainBatch(
        c.mask.long(), c.mask.long(), c.mask, one_per_sequence(c), c.anchor if c.behaviour is None else c.behaviour
    )
    batch.ref_logprobs = c.ref
    batch.proximal_logprobs = None if c.behaviour is None else c.anchor
    entropy = torch.zeros_like(c.mask)
    loss, _ = loss_fn.from_logprobs(c.logprobs, entropy, batch, totals(c))
    (grad,) = torch.autograd.grad(loss, c.logprobs)
    found = {"loss": number(loss), "grad_logprobs": grad.tolist()}
    tokens = loss_fn.tokens(c.logprobs, batch)
    per_token, extra = loss_fn.policy_gradient(tokens)
    if c.peer == "AReaL":
        per_token = torch.where(c.mask > 0, per_token, where_masked(c, loss_fn, batch, per_token))
    found["per_token_loss"] = per_token.tolist()
    return found | weights(c, loss_fn) | verl_metrics(c, extra)


def where_masked(c: Case, loss_fn: PolicyLoss, batch: TextTrainBatch, per_token: Tensor) -> Tensor:
    """What AReaL's per-token loss holds where masked, which nothing uses: the loss as if the token counted (SAPO), that
    of a ratio of 0 (PPO), or that of its sequence (GSPO)."""
    if isinstance(loss_fn, SAPOLoss):
        everything = dataclasses.replace(batch, target_mask=torch.ones_like(c.mask))
        return loss_fn.policy_gradient(loss_fn.tokens(c.logprobs, everything))[0]
    if isinstance(loss_fn, GSPOLoss):
        return per_token
    ratio = torch.zeros_like(c.mask)
    return clipped_policy_gradient(ratio, c.advantages, c.params["clip_low"], c.params["clip_high"])[0]


def weights(c: Case, loss_fn: PolicyLoss) -> dict[str, Any]:
    correction, anchor, behaviour = loss_fn.correction, c.anchor, c.behaviour
    if isinstance(loss_fn, ReinforceLoss):  # its own weight is a truncated one against the sampler
        correction, anchor, behaviour = (
            TruncatedIS("token", loss_fn.weight_min, loss_fn.weight_max),
            c.logprobs,
            c.anchor,
        )
    if correction is None or behaviour is None:
        return {}
    found = correction.weights(anchor, behaviour, c.mask).tolist()
    return {"is_weights": found, "behave_imp_weight": found}


def verl_metrics(c: Case, extra: dict[str, Tensor]) -> dict[str, Any]:
    """verl's names for means over tokens: clipped share, KL(old || new) by k1, share that the dual clip decided."""
    mean = lambda x: number(aggregate(x.to(c.mask.dtype), c.mask, totals_of_tokens(c), "token_mean"))
    clipped = extra.get("clip/fraction", torch.zeros_like(c.mask))
    lower = extra.get("clip/dual_fraction", torch.zeros_like(c.mask))
    if c.algorithm == "GMPO":  # verl counts every log-ratio out of bounds, by the sign of the advantage
        out = ((c.logprobs - c.anchor) < -c.params["clip_low"]) | ((c.logprobs - c.anchor) > c.params["clip_high"])
        clipped, lower = out & (c.advantages > 0), out & (c.advantages < 0)
    kl = compute_kl(c.anchor, c.logprobs, c.mask, "k1")
    if c.algorithm not in ("GSPO", "GMPO"):
        kl = kl.clamp(-20.0, 20.0)
    return {"actor/pg_clipfrac": mean(clipped), "actor/ppo_kl": mean(kl), "actor/pg_clipfrac_lower": mean(lower)}


def one_per_sequence(c: Case) -> Tensor:
    """The advantages that a loss gets: a sequence-level peer's single one, in each of its positions."""
    if c.peer == "AReaL" and c.params.get("importance_sampling_level") == "sequence":
        return sequence_mean(c.advantages, c.mask)
    if c.algorithm.startswith("RLOO"):
        return c.advantages[:, :1].expand_as(c.mask)
    return c.advantages * c.params.get("adv_tau", 1.0)


def totals_of_tokens(c: Case) -> Totals:
    return Totals(int(c.mask.sum()), 1)


def totals(c: Case) -> Totals:
    """The peer's denominators: which sequences count, and how many tokens a step has."""
    p, mask = c.params, c.mask
    tokens = p.get("rl_scale") or int(mask.sum())
    if p.get("loss_type") in ("dapo", "cispo"):
        tokens = p.get("num_items_in_batch") or tokens
    if p.get("agg") == "sum":
        tokens = 1
    with_tokens_only = c.peer in ("verl", "OpenRLHF") and c.algorithm != "GMPO"
    sequences = int((mask.sum(1) > 0).sum()) if with_tokens_only else len(mask)
    horizon = p.get("max_completion_length") or p.get("max_seq_len") or p.get("loss_scale_factor") or mask.shape[1]
    return Totals(tokens, sequences, horizon)


def agg_type(c: Case, default: str) -> Any:
    p = c.params
    by_loss_type = {"grpo": "sequence_mean", "dr_grpo": "fixed_horizon", "sapo": "sequence_mean"}
    if "loss_type" in p:
        return by_loss_type.get(p["loss_type"], "token_mean")
    if "token_level_loss" in p:
        return "token_mean" if p["token_level_loss"] else "sequence_mean"
    if c.peer == "AReaL":
        return "token_mean"
    names = {
        "token-mean": "token_mean",
        "token_mean": "token_mean",
        "mean": "token_mean",
        "sum": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "sequence_mean": "sequence_mean",
        "seq-mean-token-sum": "sequence_sum",
        "seq-mean-token-sum-norm": "fixed_horizon",
        "seq_mean_token_sum_norm": "fixed_horizon",
    }
    return names.get(str(p.get("agg", "")).split(" ")[0], default)


def correction(c: Case) -> Correction | None:
    p = c.params
    if c.behaviour is None:
        return None
    if c.peer == "verl":
        threshold = p["threshold"]
        if isinstance(threshold, str):
            low, high = map(float, threshold.split("_"))
            return IcePop(low, high)
        return TruncatedIS(p["is_level"], 0.0, threshold)
    if c.peer == "SkyRL":
        return TruncatedIS(p["tis_ratio_type"], 0.0, p["cap"])
    if c.peer == "OpenRLHF":
        kinds: dict[str, Callable[..., Correction]] = {
            "tis": lambda low, high: TruncatedIS("token", low, high),
            "icepop": IcePop,
            "seq-mask-tis": SequenceMask,
        }
        return kinds[p["vllm_is_correction_type"]](*p["vllm_is_truncated_threshold"])
    if c.peer == "AReaL":
        if p["level"] == "sequence":
            return SequenceMask(p["lower"], p["upper"], "geometric")
        return (IcePop if p["action"] == "mask" else lambda a, b: TruncatedIS("token", a, b))(p["lower"], p["upper"])
    return TruncatedIS("token", 0.0, math.inf)  # TRL's weight comes truncated


def build(c: Case) -> PolicyLoss:
    """The loss of our library that the peer's name and parameters mean."""
    p, name = c.params, c.algorithm.lower()
    low, high = p.get("clip_low", 0.2), p.get("clip_high", 0.28)
    sequence_level = p.get("importance_sampling_level") == "sequence"
    common = {"beta": p.get("beta", 0.0)}
    if name == "simplegrpoloss":
        return GRPOLoss(agg_type="sequence_mean", **common)
    if "unclipped" in name:
        return GRPOLoss(1.0, math.inf, agg_type=agg_type(c, "token_mean"), **common)
    if name.startswith("reinforce"):
        low, high = (0.0, p["is_cap"]) if "is_cap" in p else (1.0, 1.0)
        return ReinforceLoss(low, high, agg_type=agg_type(c, "token_mean"), **common)
    if name.startswith("cispo"):
        if "epsilon_high" in p:  # TRL: the bound itself, and none below
            low, high = 1.0, p["epsilon_high"] - 1.0
        return CISPOLoss(low, high, agg_type=agg_type(c, "token_mean"), **common)
    if name.startswith("gspo"):
        variant: Any = "token" if c.peer in ("verl", "SkyRL") else "sequence"
        agg: Any = "sequence_mean" if c.peer == "OpenRLHF" else agg_type(c, "sequence_mean")
        return GSPOLoss(low, high, agg_type=agg, variant=variant, **common)
    if name.startswith("sapo"):
        return SAPOLoss(p["tau_pos"], p["tau_neg"], agg_type=agg_type(c, "sequence_mean"), **common)
    if name.startswith(("dppo", "prime-rl")):
        return trust_region(p, common)
    if name.startswith("gmpo"):
        return GMPOLoss(low, high, **common)
    if name.startswith("rloo"):
        return RLOOLoss(low, high, **common)
    assert not sequence_level, c.algorithm
    dual = p.get("dual_clip", p.get("clip_ratio_c", p.get("delta")))
    return DAPOLoss(low, high, agg_type=agg_type(c, "token_mean"), dual_clip=dual, correction=correction(c), **common)


def trust_region(p: Params, common: dict[str, Any]) -> DPPOLoss:
    if "ipo_threshold" in p:
        bounds = (p["ipo_threshold"], p["ipo_threshold"])
        return DPPOLoss(*bounds, two_sided=True, drift_coef=p["kl_tau"], **common)
    if "clip_ratio_c" in p:
        return DPPOLoss(p["clip_low"], p["clip_high"], ratio_cap=p["clip_ratio_c"], **common)
    return DPPOLoss(p["dppo_mask_low"], p["dppo_mask_high"], drift_coef=p["kl_tau"], **common)


def torchforge_reinforce(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    logits = tensor(inputs["trainer_logits"]).requires_grad_()
    names = ("target_ids", "target_weights", "target_log_probs", "target_mask")
    ids, advantages, sampler, mask = (tensor(inputs[name]) for name in names)
    loss, _ = ReinforceLoss(*params["clamp"])(logits, ids.long(), advantages, sampler, mask)
    (grad,) = torch.autograd.grad(loss, logits)
    return {"loss": number(loss), "grad_logits": grad.tolist()}

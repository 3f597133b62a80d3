"""KL, aggregation, log-probabilities, advantages and shaping of the vectors, in terms of our functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forge_core.algorithms.advantages import (
    by_group,
    group_advantages,
    has_signal,
    leave_one_out,
    length_weighted,
    max_rl,
    reinforce_plus_plus,
    scale_by_batch,
    whiten,
)
from forge_core.algorithms.advantages import (
    gae as our_gae,
)
from forge_core.algorithms.ops import Totals, aggregate, compute_entropy, compute_kl, compute_logprobs
from forge_core.algorithms.shaping import overlong_penalty
from tests.conformance.numbers import number, tensor

Params = dict[str, Any]


def _kl(peer: str, inputs: dict[str, Any], params: Params, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logprobs, ref = tensor(inputs["logprobs"]).requires_grad_(), tensor(inputs["ref_logprobs"])
    name = params["estimator"].replace("low_var_kl", "k3")
    clamped = params.get("apply_clamp", peer == "OpenRLHF" or name.startswith("k3"))
    mask = torch.ones_like(ref) if mask is None else mask
    return logprobs, compute_kl(logprobs, ref, mask, name, max_abs=10.0 if clamped else None)


def kl(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    logprobs, value = _kl(peer, inputs, params)
    (grad,) = torch.autograd.grad(value.sum(), logprobs)
    return {"kl": value.tolist(), "grad_sum_wrt_logprobs": grad.tolist()}


def kl_in_loss(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    mask = tensor(inputs["mask"])
    logprobs, value = _kl(peer, inputs, params, mask)
    term = params["kl_coef"] * aggregate(value, mask, Totals(int(mask.sum()), 1), "token_mean")
    (grad,) = torch.autograd.grad(term, logprobs)
    return {"loss_term": number(term), "grad_logprobs": grad.tolist()}


def aggregation(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    values, mask = tensor(inputs["per_token_loss"]).requires_grad_(), tensor(inputs["mask"])
    mode = params.get("mode") or params.get("reduction") or _mode(peer, params)
    ids = None
    if mode in ("prompt_mean", "token_mean_legacy"):
        ids = _blocks(params, mask)
    totals = _totals(peer, params, mode, mask, ids)
    names = {
        "token": "token_mean",
        "prompt_mean": "sequence_mean",
        "token_mean_legacy": "sequence_mean",
        "seq-mean-token-sum": "sequence_sum",
        "seq-mean-token-mean": "sequence_mean",
        "sequence_mean": "sequence_mean",
        "seq-mean-token-sum-norm": "fixed_horizon",
        "seq_mean_token_sum_norm": "fixed_horizon",
    }
    result = aggregate(values, mask, totals, names.get(mode, "token_mean"), ids) * params.get("dp_size", 1)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(result, values)
    times = (grad * values).tolist()
    return {
        "loss": number(result),
        "grad_per_token_loss": grad.tolist(),
        "grad_per_token_loss_times_per_token_loss": times,
    }


def _mode(peer: str, params: Params) -> str:
    if "token_level_loss" in params:
        return "token-mean" if params["token_level_loss"] else "seq-mean-token-mean"
    return "sequence_mean" if peer == "torchforge" else "token-mean"


def _blocks(params: Params, mask: Tensor) -> Tensor:
    """Rows that are averaged together, as if they were one packed document."""
    size = params.get("micro_batch_size", 1)
    bounds = params.get("prompt_boundaries") or [[i, i + size] for i in range(0, len(mask), size)]
    ids = torch.zeros(mask.shape, dtype=torch.long)
    for block, (start, end) in enumerate(bounds):
        ids[start:end] = block
    return ids


def _totals(peer: str, params: Params, mode: str, mask: Tensor, ids: Tensor | None) -> Totals:
    tokens = params.get("batch_num_tokens") or int(mask.sum())
    if mode == "token-sum":
        tokens = 1
    filled = int((mask.sum(1) > 0).sum()) if peer in ("verl", "OpenRLHF") else len(mask)
    sequences = params.get("global_batch_size") or (filled if ids is None else int(ids.max()) + 1)
    return Totals(tokens, sequences, params.get("loss_scale_factor") or params.get("max_seq_len") or mask.shape[1])


def logprobs(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    logits, labels = tensor(inputs["logits"]).requires_grad_(), tensor(inputs["labels"]).long()
    found = compute_logprobs(logits, labels, params["temperature"])
    entropy = compute_entropy(logits, params["temperature"])
    (grad,) = torch.autograd.grad(found.sum(), logits)
    mask = torch.ones_like(entropy)
    mask[0, 0] = 0.0  # of the one function that takes a mask
    mean = aggregate(entropy, mask, Totals(int(mask.sum()), 1), "token_mean")
    return {
        "logprobs": found.tolist(),
        "entropy": entropy.tolist(),
        "grad_sum_logprobs_wrt_logits": grad.tolist(),
        "entropy_loss_token_mean": number(mean),
        "mask": mask.tolist(),
    }


def aligned_logprobs(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    logits, response = tensor(inputs["logits"]).requires_grad_(), tensor(inputs["response_ids"]).long()
    found = compute_logprobs(logits[:, -response.shape[1] - 1 : -1], response, params["temperature"])
    (grad,) = torch.autograd.grad(found.sum(), logits)
    return {"logprobs": found.tolist(), "grad_sum_logprobs_wrt_logits": grad.tolist()}


def advantages(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    rewards, groups = [float(r) for r in inputs["rewards"]], inputs["group_index"]
    mask = tensor(inputs["mask"])
    if algorithm.startswith("REINFORCE++"):
        return _whitened(peer, algorithm, rewards, groups, mask, params)
    found = _of_groups(peer, algorithm, rewards, groups, mask, params)
    token = (torch.tensor(found, dtype=torch.float64)[:, None] * mask).tolist()
    return {"advantages": found, "advantages_token": token, "returns_token": token}


def _of_groups(
    peer: str, algorithm: str, rewards: list[float], groups: list[int], mask: Tensor, params: Params
) -> list[float]:
    eps, name = params.get("eps", 1e-6), algorithm.lower()
    single: Any = "reward" if _keeps_single(peer, algorithm, params) else "zero"
    estimate: Callable[..., list[float]] = partial(group_advantages, eps=eps, ddof=1)
    centred = partial(group_advantages, normalize=False)
    if name == "areal normalization":
        if params["mean_level"] == "batch":
            return group_advantages(rewards, eps=eps, ddof=int(params["std_unbiased"]))
        estimate = partial(group_advantages, eps=eps, ddof=int(params["std_unbiased"]))
        estimate = leave_one_out if params["mean_leave1out"] else estimate
    elif name == "batch-std scaling":
        return scale_by_batch(by_group(centred, groups, rewards), rewards, eps=eps)
    elif name == "rloo":
        found = by_group(leave_one_out, groups, rewards, single=single)
        return scale_by_batch(found, eps=eps) if params.get("normalize_advantages") else found
    elif name == "opo":
        return by_group(length_weighted, groups, rewards, mask.sum(1).tolist(), single=single)
    elif name == "maxrl":
        estimate = partial(max_rl, eps=params.get("eps", 0.0))
    elif "no std" in name:
        estimate = centred
    return by_group(estimate, groups, rewards, single=single)


def _keeps_single(peer: str, algorithm: str, params: Params) -> bool:
    return peer == "verl" or (peer == "SkyRL" and algorithm.lower() != "rloo") or bool(params.get("mean_leave1out"))


def _whitened(
    peer: str, algorithm: str, rewards: list[float], groups: list[int], mask: Tensor, params: Params
) -> dict[str, Any]:
    if algorithm.endswith("baseline"):
        single: Any = "reward" if _keeps_single(peer, algorithm, params) else "zero"
        rewards = by_group(partial(group_advantages, normalize=False), groups, rewards, single=single)
    at_end = torch.tensor(rewards, dtype=torch.float64)
    found, returns = reinforce_plus_plus(at_end, mask, params.get("gamma", 1.0))
    if peer == "OpenRLHF":  # plain variance, and masked positions are whitened along
        found = whiten(returns, mask, ddof=0)
    return {"advantages_token": found.tolist(), "returns_token": returns.tolist()}


def gae(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    rewards, values, mask = (tensor(inputs[name]) for name in ("token_level_rewards", "values", "mask"))
    steps = mask
    if peer == "OpenRLHF":  # what is masked is zero, not stepped over
        rewards, values, steps = rewards * mask, values * mask, torch.ones_like(mask)
    if peer == "SkyRL":  # every position is a step
        steps = torch.ones_like(mask)
    found, returns = our_gae(rewards, values, steps, params["gamma"], params["lam"])
    if peer != "OpenRLHF":
        found = whiten(found, mask)
    return {"advantages_token": found.tolist(), "returns_token": returns.tolist()}


def overlong(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    longest = params.get("max_len") or params["max_completion_len"]
    buffer = params.get("buffer") or params["soft_punish_cache"]
    found = [overlong_penalty(n, longest, buffer, params.get("factor", 1.0)) for n in inputs["lengths"]]
    shaped = [reward + penalty for reward, penalty in zip(inputs["base_rewards"], found, strict=True)]
    return {"penalty": found, "shaped_reward": shaped, "n_penalized": sum(p < 0 for p in found)}


def keep_groups(peer: str, algorithm: str, inputs: dict[str, Any], params: Params) -> dict[str, Any]:
    return {"keep": [has_signal(group["rewards"]) for group in inputs["groups"]]}

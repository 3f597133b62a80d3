"""Advantages without a critic: of one group, of a batch of groups, and of tokens.

Invariants: equal rewards give exactly 0 for every member (no division, no rounding noise); a deviation that is only
rounding is never blown up; missing rewards are the caller's to leave out first (``fates.py`` drops such episodes).

A value model is out of scope: ``gae`` is for token rewards with values that the caller has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge_core.config.algorithm_sections import AdvantageSection

ROUNDING = 1e-9  # rewards that differ by less, relative to their size, are equal


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ by more than rounding."""
    spread = max(rewards) - min(rewards)
    return spread > ROUNDING * max(1.0, abs(max(rewards)), abs(min(rewards)))


def group_advantages(
    rewards: Sequence[float], *, normalize: bool = True, eps: float = 1e-4, ddof: int = 1
) -> list[float]:
    """Advantages of one group: ``(r - mean) / (std + eps)`` (GRPO, arXiv 2402.03300), or ``r - mean`` when
    ``normalize`` is false (Dr. GRPO, arXiv 2503.20783). ``ddof``: 1 for the unbiased variance, 0 for the plain one.

    Raises ValueError for a group of fewer than two.
    """
    _check_group(rewards)
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    centred = [r - _mean(rewards) for r in rewards]
    if not normalize:
        return centred
    scale = _std(rewards, ddof) + eps
    return [c / scale for c in centred]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """RLOO (arXiv 2402.14740): each reward minus the mean of the others. Raises ValueError for fewer than two."""
    _check_group(rewards)
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    factor = len(rewards) / (len(rewards) - 1)
    return [(r - _mean(rewards)) * factor for r in rewards]


def max_rl(rewards: Sequence[float], eps: float = 0.0) -> list[float]:
    """MaxRL (arXiv 2602.02710): ``(r - mean) / (mean + eps)``, so hard prompts weigh more; for rewards from 0 up.

    A group whose mean is not positive gives 0. Raises ValueError for fewer than two.
    """
    _check_group(rewards)
    mean = _mean(rewards)
    if mean <= 0 or not has_signal(rewards):
        return [0.0] * len(rewards)
    return [(r - mean) / (mean + eps) for r in rewards]


def length_weighted(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """OPO (arXiv 2505.23585): each reward minus the mean weighted by response length, the baseline of least variance
    when every token has the same gradient norm. Raises ValueError for fewer than two."""
    _check_group(rewards)
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    baseline = math.fsum(r * n for r, n in zip(rewards, lengths, strict=True)) / max(sum(lengths), 1)
    return [r - baseline for r in rewards]


def whiten_sequences(advantages: Sequence[float], lengths: Sequence[int], eps: float = 1e-8) -> list[float]:
    """``whiten`` for advantages that are one number a sequence: mean and variance (ddof 1) weigh each sequence by its
    tokens. This is REINFORCE++ (arXiv 2501.03262) with gamma 1 and the reward at the end. Equal advantages give 0."""
    tokens = sum(lengths)
    if tokens < 2 or not has_signal(advantages):
        return [0.0] * len(advantages)
    mean = math.fsum(a * n for a, n in zip(advantages, lengths, strict=True)) / tokens
    variance = math.fsum(n * (a - mean) ** 2 for a, n in zip(advantages, lengths, strict=True)) / (tokens - 1)
    return [(a - mean) / math.sqrt(variance + eps) for a in advantages]


def build_estimator(section: AdvantageSection) -> Callable[[Sequence[float]], list[float]]:
    """The advantages of one group that a configuration names; ``whitens`` says whether the batch is whitened after."""
    if section.estimator == "leave_one_out":
        return leave_one_out
    if section.estimator == "max_rl":
        return max_rl
    if section.estimator == "reinforce_plus_plus":
        return list
    if section.estimator == "reinforce_plus_plus_baseline":
        return partial(group_advantages, normalize=False)
    return partial(group_advantages, normalize=section.normalize, eps=section.eps)


def whitens(section: AdvantageSection) -> bool:
    """Whether the configured estimator whitens over the batch's tokens in the end (both forms of REINFORCE++)."""
    return section.estimator.startswith("reinforce_plus_plus")


def compares(section: AdvantageSection) -> bool:
    """Whether the configured estimator compares the samples of one prompt, so that equal rewards teach nothing."""
    return section.estimator != "reinforce_plus_plus"


def by_group(
    estimate: Callable[..., list[float]],
    groups: Sequence[Hashable],
    *columns: Sequence[float],
    single: Literal["zero", "reward"] = "zero",
) -> list[float]:
    """``estimate`` for every group of a batch, in the order of the batch.

    ``groups`` names each row's group; ``columns`` hold one value a row (rewards first, then what else ``estimate``
    takes, such as lengths), and ``estimate`` gets those of one group. ``single``: a group of one has nothing to be
    compared with, so its advantage is 0, or it keeps its reward (a baseline of 0: plain REINFORCE).
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    found = [0.0] * len(groups)
    for rows in members.values():
        parts = [[column[row] for row in rows] for column in columns]
        alone = parts[0] if single == "reward" else [0.0]
        values = estimate(*parts) if len(rows) > 1 else alone
        for row, value in zip(rows, values, strict=True):
            found[row] = value
    return found


def scale_by_batch(
    advantages: Sequence[float], spread_of: Sequence[float] | None = None, *, eps: float = 1e-4, ddof: int = 1
) -> list[float]:
    """Centred advantages of a batch divided by one standard deviation for all its groups, so that groups that are
    nearly solved or nearly hopeless are not favoured.

    ``spread_of``: whose deviation divides; left out: that of the advantages themselves (TRL and REINFORCE++ differ in
    this: TRL divides centred rewards by the deviation of the rewards).
    """
    spread = advantages if spread_of is None else spread_of
    if not any(advantages) or not has_signal(spread):
        return [0.0] * len(advantages)
    scale = _std(spread, ddof) + eps
    return [a / scale for a in advantages]


def whiten(values_BT: Tensor, mask_BT: Tensor, eps: float = 1e-8, ddof: int = 1) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` with mean and variance over the tokens that count. Give it a whole batch."""
    valid_BT = mask_BT > 0
    count = int(valid_BT.sum())
    if count == 0:
        return torch.zeros_like(values_BT)
    mean = values_BT[valid_BT].mean()
    variance = (values_BT[valid_BT] - mean).square().sum() / max(count - ddof, 1)
    return (values_BT - mean) * torch.rsqrt(variance + eps)


def returns_to_go(rewards_BT: Tensor, mask_BT: Tensor, gamma: float = 1.0) -> Tensor:
    """``R_t = r_t + gamma R_{t+1}`` over the tokens that count, zero elsewhere; tokens between are stepped over."""
    following_B = torch.zeros_like(rewards_BT[:, 0])
    returns_BT = torch.zeros_like(rewards_BT)
    for t in reversed(range(rewards_BT.shape[1])):
        valid_B = mask_BT[:, t] > 0
        following_B = torch.where(valid_B, rewards_BT[:, t] + gamma * following_B, following_B)
        returns_BT[:, t] = torch.where(valid_B, following_B, 0.0)
    return returns_BT


def reinforce_plus_plus(rewards_B: Tensor, mask_BT: Tensor, gamma: float = 1.0, ddof: int = 1) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): returns-to-go of rewards at the last token, whitened over the batch's tokens.

    Its baseline form is the same with rewards that had their group's mean subtracted first
    (``group_advantages(..., normalize=False)``). Returns advantages and returns, ``[B, T]``, zero where masked.
    """
    returns_BT = returns_to_go(at_last_token(rewards_B, mask_BT), mask_BT, gamma)
    return torch.where(mask_BT > 0, whiten(returns_BT, mask_BT, ddof=ddof), 0.0), returns_BT


def at_last_token(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Each sequence's reward at its last token that counts, ``[B, T]``; nowhere when there is none."""
    valid_BT = mask_BT > 0
    after_BT = valid_BT.flip(1).cumsum(1).flip(1)  # tokens that count from here on
    return torch.where(valid_BT & (after_BT == 1), rewards_B[:, None], 0.0)


def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438): advantages and returns (A + V), ``[B, T]``.

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``. Tokens that do not count (written by
    a tool) are stepped over: next value and next advantage are those of the next token that counts, and they hold the
    advantage carried over them.
    """
    value_B, advantage_B = torch.zeros_like(values_BT[:, 0]), torch.zeros_like(values_BT[:, 0])
    advantages_BT = torch.zeros_like(values_BT)
    for t in reversed(range(values_BT.shape[1])):
        valid_B = mask_BT[:, t] > 0
        delta_B = rewards_BT[:, t] + gamma * value_B - values_BT[:, t]
        advantage_B = torch.where(valid_B, delta_B + gamma * lam * advantage_B, advantage_B)
        value_B = torch.where(valid_B, values_BT[:, t], value_B)
        advantages_BT[:, t] = advantage_B
    return advantages_BT, advantages_BT + values_BT


def _check_group(rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise ValueError("a group advantage needs at least two rewards")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float], ddof: int) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))

"""A first call of a loss of the user's own, before anything is loaded: on a small batch with everything in it.

Invariant: the loss that is called is thrown away, so what it remembers of the call reaches no run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_core.algorithms.losses.base import PolicyLoss
from forge_core.algorithms.ops import Totals
from forge_core.config.errors import ConfigError
from forge_core.data_model import TextTrainBatch
from forge_core.redaction import redact

ROWS, LENGTH = 2, 64
WANTED = (
    "it must return (loss, metrics): a tensor of shape [B, T] like tokens.logprobs, with its gradient, and a dict of "
    "names to such tensors, which may be empty: return loss, {}"
)


def probe(loss: PolicyLoss, path: str) -> None:
    """Call ``loss``, which the configuration names ``path``, once. Raises ConfigError naming ``loss.path`` for one that
    fails, or whose ``policy_gradient`` returns no loss and metrics per position."""
    name = f"loss.path: {path}: {type(loss).__name__}"
    if type(loss).policy_gradient is PolicyLoss.policy_gradient:
        raise ConfigError([f"{name} has no policy_gradient(self, tokens): {WANTED}"])
    batch, logprobs_BT = _batch()
    try:
        result = loss.policy_gradient(loss.tokens(logprobs_BT, batch))
        if wrong := _wrong(result):
            raise ConfigError([f"{name}.policy_gradient returned {wrong}; {WANTED}"])
        whole, _ = loss.from_logprobs(logprobs_BT, torch.ones(ROWS, LENGTH), batch, Totals(2 * LENGTH, 3, LENGTH))
        whole.backward()
    except ConfigError:
        raise
    except Exception as error:  # the formula is the user's code
        hint = "; does its __init__ call super().__init__?" if not hasattr(loss, "agg_type") else ""
        raise ConfigError(
            [
                f"{name} failed on a small batch ([{ROWS}, {LENGTH}], three documents): {type(error).__name__}: "
                f"{redact(str(error))}{hint}"
            ]
        ) from error


def described(result: Any) -> str:
    """What a loss returned, for errors."""
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, (tuple, list)):
        return f"({', '.join(map(described, result))})"
    return f"a {type(result).__name__}" if result is not None else "None"


def _wrong(result: Any) -> str | None:
    """What is wrong with what a ``policy_gradient`` returned; None: nothing."""
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[1], dict):
        return described(result)
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.shape != (ROWS, LENGTH):
        return described(result)
    if not loss.requires_grad:
        return "a loss that does not depend on tokens.logprobs (it has no gradient)"
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.shape not in {(), (ROWS, LENGTH)}:
            return f"{described(value)} as the metric {name!r}"
    return None


def _batch() -> tuple[TextTrainBatch, Tensor]:
    """Two rows with three documents and padding, and the policy's log-probabilities, a little off the sampler's."""
    draw = torch.Generator().manual_seed(0)
    random_BT = lambda: torch.rand(ROWS, LENGTH, generator=draw)
    sampled_BT, ids = -random_BT(), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    documents_BT, mask_BT = torch.zeros_like(ids), torch.ones(ROWS, LENGTH)
    documents_BT[0, LENGTH // 2 :], documents_BT[1] = 1, 2
    documents_BT[1, LENGTH // 2 :], mask_BT[1, LENGTH // 2 :] = -1, 0.0
    batch = TextTrainBatch(
        ids,
        ids,
        mask_BT,
        random_BT() - 0.5,
        generator_logprobs=sampled_BT,
        ref_logprobs=sampled_BT - 0.1 * random_BT(),
        proximal_logprobs=sampled_BT + 0.1 * random_BT(),
        document_ids=documents_BT,
    )
    return batch, (sampled_BT + 0.1 * random_BT()).requires_grad_()

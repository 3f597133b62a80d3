"""The values that tasks and engines exchange in memory.

Invariants:
- Token-in, token-out: ``prompt_ids`` and ``response_ids`` are what the engine consumed and sampled; no text is ever
  tokenised again after sampling.
- Lists that run along the response (``response_ids``, ``response_mask``, ``response_logprobs``) have one length.
- Log-probabilities are natural logarithms, taken at the temperature that was used to sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    ``temperature`` 0 is greedy. ``top_p`` 1.0, ``top_k`` 0 and ``min_p`` 0.0 mean no truncation.
    ``max_new_tokens`` counts sampled tokens, the stop token included.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 128

    @property
    def truncated(self) -> bool:
        """Whether some tokens can never be drawn, which biases the importance ratio."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample.

    ``seed`` alone decides the random numbers of this request, whatever else shares its batch. ``priority`` orders
    requests that wait (lower first: the batch number). ``min_version``: the oldest policy version that may sample its
    first token; an engine that serves an older one refuses it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    priority: int = 0
    min_version: int = 0


@dataclass(frozen=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a response were sampled by policy ``version``."""

    version: int
    start: int
    end: int


@dataclass
class Completion:
    """What a generator returns for one request.

    ``token_ids`` and ``logprobs`` have one length: the sampled tokens (EOS included when it was sampled) and the
    sampler's log-probability of each. ``metadata`` always holds ``request_id`` (str), ``prompt_ids`` (list of int),
    ``finish_reason`` (``"stop"``: EOS was sampled; ``"length"``: ``max_new_tokens`` reached; ``"aborted"``),
    ``policy_version`` (int: version at the first sampled token) and ``version_spans`` (list of VersionSpan).
    """

    prompt: str
    text: str
    token_ids: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Episode:
    """One row of ``episodes`` joined with its row of ``rewards`` (``reward`` is None when scoring failed)."""

    episode_id: str
    group_id: str
    sample_index: int
    prompt_id: str
    messages: list[dict[str, str]]
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[bool]
    response_logprobs: list[float]
    text: str
    finish_reason: str
    policy_version: int
    version_spans: list[VersionSpan]
    target: str | None
    task: str
    metadata: dict[str, Any]
    sampling: dict[str, Any]
    created_at: str
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    reward_status: str = "ok"
    reward_error: str | None = None


@dataclass
class TextTrainBatch:
    """One micro-batch for the trainer. Every tensor is ``[batch, seq_len]``.

    ``target_ids[b, t]`` is the token that position ``t`` predicts (``input_ids`` shifted left inside each document).
    ``target_mask`` is 1 where the prediction counts in the loss. ``target_weights`` are the advantages (RL) or the
    token weights (SFT), float32. The optional tensors are aligned with ``target_ids``: ``generator_logprobs`` and
    ``ref_logprobs`` (float32, log-probability of ``target_ids`` under the sampler and the reference);
    ``position_ids`` restart at 0 in each packed document; ``document_ids`` number the packed documents of the whole
    step from 0 (padding: -1); ``proximal_logprobs`` are the trainer's own at the start of the training step, for
    losses with an off-policy correction; ``crossed`` is 1 in responses that several policy versions sampled (None:
    there are none).
    """

    input_ids: torch.Tensor
    target_ids: torch.Tensor
    target_mask: torch.Tensor
    target_weights: torch.Tensor
    generator_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    proximal_logprobs: torch.Tensor | None = None
    crossed: torch.Tensor | None = None


@dataclass
class ForwardBackwardResult:
    """``loss`` is this call's share of the global loss; ``metrics`` are floats that add up over micro-batches."""

    loss: float
    metrics: dict[str, float]


@dataclass
class OptimStepResult:
    """``step`` counts optimizer steps done; ``learning_rate`` is the one that this step used; ``grad_norm`` is
    the total L2 norm before clipping."""

    step: int
    learning_rate: float
    grad_norm: float

"""From what an engine sampled to completions: the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge_core.data_model import Completion, GenerationRequest, VersionSpan
from forge_core.generation.base import GenerationError
from forge_core.generation.sampling import is_truncated


@dataclass(frozen=True)
class Sampled:
    """One response; ``version``: the policy version of its first token, or that would have sampled it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int
    spans: list[VersionSpan]


def completions(tokenizer: Any, requests: Sequence[GenerationRequest], sampled: Sequence[Sampled]) -> list[Completion]:
    """One completion per request, in order. Raises GenerationError for log-probabilities that are not finite."""
    backend = tokenizer.backend_tokenizer
    texts = backend.decode_batch([s.token_ids for s in sampled], skip_special_tokens=True)
    prompts = list(dict.fromkeys(r.prompt_ids for r in requests))
    prompt_texts = dict(zip(prompts, backend.decode_batch(prompts, skip_special_tokens=False), strict=True))
    return [
        Completion(prompt_texts[r.prompt_ids], text, s.token_ids, s.logprobs, _metadata(r, s))
        for r, s, text in zip(requests, sampled, texts, strict=True)
    ]


def _metadata(request: GenerationRequest, sampled: Sampled) -> dict[str, Any]:
    total = sum(sampled.logprobs)
    if total != total or total == float("-inf"):
        raise GenerationError(
            f"policy version {sampled.version} gives log-probabilities that are not finite (request "
            f"{request.request_id}): training has diverged, go back to an earlier version"
        )
    metadata = {
        "request_id": request.request_id,
        "prompt_ids": list(request.prompt_ids),
        "finish_reason": sampled.finish_reason,
        "policy_version": sampled.version,
        "version_spans": sampled.spans,
    }
    if is_truncated(request.sampling):
        metadata["truncated_sampling"] = True
    return metadata

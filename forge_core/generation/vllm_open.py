"""A request while an engine works on it, and what is reported of it in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Settings that are classes of vLLM, and mappings in a file.
PARTS = {"repetition_detection": "RepetitionDetectionParams", "structured_outputs": "StructuredOutputsParams"}


@dataclass(eq=False)
class Open:
    """One request that is not finished. ``spans``: (version, first token) of each version that sampled for it.
    ``arrival``: its number among the requests of its engine, once it has been given to it."""

    request: dict[str, Any]
    spans: list[tuple[int, int]] = field(default_factory=list)
    attempt: int = 0
    again: bool = False
    aborted: bool = False
    arrival: int | None = None

    @property
    def inner_id(self) -> str:
        return f"{self.request['id']}#{self.attempt}"


def sampling_params(params: dict[str, Any]) -> Any:
    """vLLM's settings of one request, which is reported once, when it has ended. Raises what vLLM says of those that it
    cannot take; in its engine's core process they would end it."""
    import vllm.sampling_params as of_vllm

    made = {key: getattr(of_vllm, name)(**params[key]) for key, name in PARTS.items() if params.get(key) is not None}
    if params.get("logit_bias"):  # JSON has made its keys text
        made["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    return of_vllm.SamplingParams(**{**params, **made}, output_kind=of_vllm.RequestOutputKind.FINAL_ONLY)


def finished(item: Open, output: Any) -> dict[str, Any]:
    """What the parent is told; ``output``: vLLM's, None where there is no token."""
    tokens: list[int] = []
    logprobs: list[float] = []
    reason = "abort"
    if output is not None:
        if list(output.prompt_token_ids) != list(item.request["prompt_ids"]):
            return {"id": item.request["id"], "refused": "the engine answered another prompt than it was given"}
        (sequence,) = output.outputs
        tokens, flat = list(sequence.token_ids), sequence.logprobs
        places = flat.start_indices if tokens else []  # of each position the sampled token is first
        if [flat.token_ids[place] for place in places] != tokens:
            return {"id": item.request["id"], "refused": "the engine's log-probabilities are of other tokens"}
        logprobs = [flat.logprobs[place] for place in places]
        reason = sequence.finish_reason or "abort"
    return {"id": item.request["id"], "tokens": tokens, "logprobs": logprobs, "reason": reason, "spans": item.spans}

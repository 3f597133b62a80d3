"""What every sampling engine offers, and the checks on requests that all of them share.

Guarantees of a ``Generator``:
- Completions come back in the order of the requests, one each, whatever order the engine finished them in.
- An engine moves only to newer policy versions; a failed update leaves the old version serving.
- A set stop token ends a call within about a second with ``forge_core.stop.Stopped``; nothing is returned.
- Past ``deadline_s`` seconds of work (waiting for the engine not counted), unfinished requests come back as
  ``"aborted"`` with what they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forge_core.data_model import Completion, GenerationRequest
from forge_core.stop import StopToken


class GenerationError(RuntimeError):
    """The engine cannot go on: what it computed is unusable."""


class Generator(Protocol):
    """A sampling engine that serves one policy version at a time."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, stop: StopToken | None = None, deadline_s: float | None = None
    ) -> list[Completion]:
        """Sample one completion per request. Raises ValueError for a request that cannot be served, before any work."""
        ...

    def update_weights(self, version: int) -> None:
        """Serve ``version`` from now on. The served version: no-op; an older one: ValueError."""
        ...

    def get_version(self) -> int:
        """The policy version that is served."""
        ...

    def run(self, stop: StopToken) -> None:
        """Serve until ``stop`` is set or the engine is shut down. Raises GenerationError when it cannot go on."""
        ...

    def shutdown(self) -> None:
        """End the engine and free its memory. Idempotent."""
        ...


def check_requests(requests: Sequence[GenerationRequest], *, max_positions: int, vocab_size: int) -> None:
    """Raise ValueError naming the first request that a model with these limits cannot serve."""
    for request in requests:
        problem = _problem(request, max_positions, vocab_size)
        if problem:
            raise ValueError(f"request {request.request_id}: {problem}")


def check_versions(requests: Sequence[GenerationRequest], served: int) -> None:
    """Raise ValueError naming the first request that version ``served`` is too old for."""
    for request in requests:
        if request.min_version > served:
            raise ValueError(
                f"request {request.request_id}: may be sampled by version {request.min_version} at least, but version "
                f"{served} is served: update the weights first"
            )


def check_newer(version: int, served: int) -> None:
    """Raise ValueError unless ``version`` is newer than the one that is served."""
    if version <= served:
        raise ValueError(f"policy version {version} is not newer than {served}, which is served already")


def _problem(request: GenerationRequest, max_positions: int, vocab_size: int) -> str | None:
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        return "the prompt has no token"
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return f"prompt token ids lie in [{min(prompt)}, {max(prompt)}], but the vocabulary has {vocab_size} tokens"
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens is {sampling.max_new_tokens}, must be at least 1"
    if len(prompt) + sampling.max_new_tokens > max_positions:
        return (
            f"prompt ({len(prompt)} tokens) plus max_new_tokens ({sampling.max_new_tokens}) is "
            f"{len(prompt) + sampling.max_new_tokens}, more than the model's {max_positions} positions"
        )
    if not sampling.temperature >= 0:
        return f"temperature is {sampling.temperature}, must be 0 (greedy) or more"
    if not (0 < sampling.top_p <= 1 and sampling.top_k >= 0 and 0 <= sampling.min_p <= 1):
        return f"top_p {sampling.top_p}, top_k {sampling.top_k} or min_p {sampling.min_p} is out of range"
    return None

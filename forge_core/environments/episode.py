"""One multi-turn episode on its way: what was said so far, as tokens, and how much may still be said.

Invariants:
- Token-in, token-out: the prompt of a turn is the prompt of the turn before, what was sampled for it and what the
  environment said, token for token; an engine that answers another prompt is an error.
- ``mask``, ``logprobs`` and ``tokens`` have one length; an environment's tokens have mask False and log-probability 0.
- An episode never has more than its request's ``max_new_tokens`` after the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forge_core.data_model import Completion, GenerationRequest, VersionSpan
from forge_core.environments.protocol import Environment, Message
from forge_core.generation.base import GenerationError
from forge_core.generation.seeds import turn_seed

MOST_KEPT = 1000  # messages, and characters of each, of an observation for which there is no room


@dataclass(eq=False)
class EpisodeInProgress:
    """``request``: of the whole episode; its ``max_new_tokens`` bounds all tokens after the prompt. ``finish_reason``
    None: it goes on; ``dropped``: why it is not used."""

    request: GenerationRequest
    policy_version: int  # of the first sampled token, or the one that would have sampled it
    environment: Environment | None = None
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    transcript: list[Message] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    turns: int = 0
    end_token: int | None = None  # with which the policy ended its last turn; None: it was cut
    asked_at: float | None = None  # when the environment began to work on its answer (monotonic, seconds)
    finish_reason: str | None = None
    dropped: str | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self.request.sampling.max_new_tokens - len(self.tokens)

    def next_request(self, max_turn_tokens: int) -> GenerationRequest:
        """The request that samples the next turn."""
        sampling = replace(self.request.sampling, max_new_tokens=min(self.room, max_turn_tokens))
        return replace(
            self.request,
            request_id=f"{self.request.request_id}/turn-{self.turns}",
            prompt_ids=(*self.request.prompt_ids, *self.tokens),
            seed=turn_seed(self.request.seed, self.turns),
            sampling=sampling,
        )

    def add_turn(self, asked: GenerationRequest, completion: Completion) -> None:
        """Append what the policy sampled."""
        meta = completion.metadata
        if tuple(meta["prompt_ids"]) != asked.prompt_ids:
            raise GenerationError(
                f"request {asked.request_id}: the engine answered another prompt than it was given: the tokens of the "
                "turns before would not be those that the policy saw"
            )
        start = len(self.tokens)
        if self.turns == 0:
            self.policy_version = meta["policy_version"]
        self.turns += 1
        self.end_token = completion.token_ids[-1] if meta["finish_reason"] == "stop" else None
        self._append(completion.token_ids, True, completion.logprobs)
        self.spans += [VersionSpan(s.version, s.start + start, s.end + start) for s in meta["version_spans"]]
        self.transcript.append({"role": "assistant", "content": completion.text})
        if meta["finish_reason"] == "aborted":
            self.end("aborted", "deadline")

    def add_observation(self, messages: list[Message], token_ids: list[int]) -> None:
        """Append what the environment said; too much of it ends the episode at its length."""
        self.transcript += messages
        if len(token_ids) >= self.room:
            self.end("length")
            return
        self._append(token_ids, False, [0.0] * len(token_ids))

    def add_what_is_too_long(self, messages: Sequence[Message]) -> None:
        """End the episode at its length with ``messages``, of which the transcript keeps the beginning."""
        self.transcript += [{**m, "content": m["content"][:MOST_KEPT]} for m in messages[:MOST_KEPT]]
        self.end("length")

    def finish(self) -> None:
        """The environment has ended the episode: its last turn is as complete as the policy made it."""
        self.end("length" if self.end_token is None else "stop")

    def end(self, finish_reason: str, dropped: str | None = None) -> None:
        if not self.ended:
            self.finish_reason, self.dropped = finish_reason, dropped

    def completion(self, prompt: str) -> Completion:
        """The episode as one completion: its text is that of the last turn, and ``metadata`` has ``response_mask`` and
        ``environment`` beside what every completion has."""
        said = [m["content"] for m in self.transcript if m["role"] == "assistant"]
        summary: dict[str, Any] = {**self.counts, "reward": self.reward, "turns": self.turns}
        metadata = {
            "request_id": self.request.request_id,
            "prompt_ids": list(self.request.prompt_ids),
            "finish_reason": self.finish_reason,
            "policy_version": self.policy_version,
            "version_spans": self.spans,
            "response_mask": self.mask,
            "environment": {**summary, "transcript": self.transcript},
            "dropped": self.dropped,
        }
        return Completion(prompt, said[-1] if said else "", self.tokens, self.logprobs, metadata)

    def _append(self, token_ids: list[int], sampled: bool, logprobs: list[float]) -> None:
        self.tokens += token_ids
        self.mask += [sampled] * len(token_ids)
        self.logprobs += logprobs

"""A policy that says what a test wants, behind the interface of a generator: characters are tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from forge_core.data_model import Completion, GenerationRequest, SamplingParams, VersionSpan
from forge_core.environments.protocol import Action, Environment, Step, Task
from forge_core.environments.rollout import Play, run_episodes
from forge_core.environments.tool_calls import parser
from forge_core.stop import StopToken

END = 0  # the token that ends a turn


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(i) for i in ids if i != END)


class Characters:
    """The part of a renderer that a rollout uses, without a chat template."""

    def after(self, observation: Sequence[dict[str, Any]], *, end_token: int | None) -> list[int]:
        return encode("".join(m["content"] for m in observation))

    def most_characters(self, tokens: int) -> int:
        return tokens

    def said(self, token_ids: Sequence[int], *, end_token: int | None) -> str:
        return decode(token_ids)


class Policy:
    """``say(text so far)`` is the next turn. ``calls`` has the request ids of each call of the engine."""

    def __init__(self, say: Callable[[str], str], seconds: float = 0.0, version: Callable[[int], int] = lambda n: 0):
        self._say, self._seconds, self._version = say, seconds, version
        self.calls: list[list[str]] = []
        self.asked: list[GenerationRequest] = []
        self._lock = threading.Lock()

    def get_version(self) -> int:
        return self._version(0)

    def generate(
        self, requests: Sequence[GenerationRequest], *, stop: StopToken | None = None, deadline_s: float | None = None
    ) -> list[Completion]:
        with self._lock:
            self.calls.append([r.request_id for r in requests])
            self.asked += requests
            number = len(self.calls)
        if stop is not None and stop.wait(self._seconds):
            stop.check()
        return [self._answer(request, number) for request in requests]

    def _answer(self, request: GenerationRequest, number: int) -> Completion:
        ids = [*encode(self._say(decode(request.prompt_ids))), END]
        cut = len(ids) > request.sampling.max_new_tokens
        ids = ids[: request.sampling.max_new_tokens]
        version = self._version(number)
        metadata = {
            "request_id": request.request_id,
            "prompt_ids": list(request.prompt_ids),
            "finish_reason": "length" if cut else "stop",
            "policy_version": version,
            "version_spans": [VersionSpan(version, 0, len(ids))],
        }
        return Completion(decode(request.prompt_ids), decode(ids), ids, [-0.5] * len(ids), metadata)


class Echo:
    """Answers each turn with its text in brackets; ``x`` ends the episode. The prompt's answer says how it fails."""

    tools: tuple[Any, ...] = ()

    def reset(self, task: Task) -> None:
        self._fate = task.answer or ""
        if self._fate == "broken at once":
            raise OSError("no game")

    def step(self, action: Action) -> Step:
        if self._fate == "broken":
            raise OSError("the game is gone")
        if self._fate == "silent":
            return Step()
        if self._fate == "nothing":
            return None  # type: ignore[return-value]
        if self._fate == "no text":
            return Step([{"role": "user"}])
        if self._fate == "not a number":
            return Step([{"role": "user", "content": "?"}], reward=float("nan"))
        if self._fate == "stuck":
            time.sleep(3600)
        if self._fate == "slow":
            time.sleep(0.2)
        if action.text.endswith("x"):
            return Step(reward=1.0, done=True)
        return Step([{"role": "user", "content": f"[{action.text}]"}], reward=0.25, counts={"echoes": 1})

    def close(self) -> None:
        pass


def play(make: Callable[[], Environment] = Echo, *, concurrent: bool = False, **changes: Any) -> Play:
    settings = {"max_turns": 5, "max_turn_tokens": 20, "turn_timeout_s": 30.0, "workers": 4, **changes}
    parse = parser("text", None, r"\{(?P<expression>[^}]*)\}", [{"function": {"name": "calculate"}}])
    return Play(make, Characters(), parse, concurrent=concurrent, **settings)  # type: ignore[arg-type]


def request(name: str, prompt: str = "q", max_tokens: int = 100) -> GenerationRequest:
    return GenerationRequest(name, tuple(encode(prompt)), 7, SamplingParams(max_new_tokens=max_tokens), 3, 2)


def episodes_of(
    policy: Policy, tasks: dict[str, Task], how: Play, max_tokens: int = 100, **keywords: Any
) -> dict[str, Completion]:
    """Each task's episode, by its name."""
    asked = [request(name, max_tokens=max_tokens) for name in tasks]
    return dict(zip(tasks, run_episodes(how, policy, asked, tasks, **keywords), strict=True))


def task(answer: str | None = None) -> Task:
    return Task([{"role": "user", "content": "q"}], answer, {}, 7)

"""What an environment is: it answers what the policy says, turn after turn, and may reward it.

Invariants:
- One environment object is one episode: ``reset`` is called once, then ``step`` once a turn, then ``close``.
- An environment says nothing before the policy does: the prompt of an episode comes from the data set, so that plans
  know its tokens. A data set of an environment is a function that makes its prompts (``dataset.path: python://…``).
- What goes wrong because of the policy (a failed tool, a move that is not allowed) is an observation. What an
  environment raises is its own failure: the episode is dropped, with the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What an episode is about: the prompt's ``messages``, its ground truth (None: there is none), the other columns of
    its row, and the seed of the sample."""

    messages: Sequence[Message]
    answer: str | None
    metadata: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote. ``error``: why it is none (``name`` and ``arguments`` are what could be read)."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Action:
    """One turn of the policy: its text without special tokens, and the tool calls in it, in order."""

    text: str
    calls: Sequence[ToolCall] = ()


@dataclass(frozen=True)
class Step:
    """The answer to an action. ``observation``: messages for the policy, nothing when ``done``. ``reward`` adds to the
    episode's. ``counts`` add to the episode's, such as ``{"tool_errors": 1}``. All is copied as plain values, which can
    be stored. Raises ValueError and TypeError for what is no message or cannot be stored, and for numbers that are not
    finite."""

    observation: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    counts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        messages = tuple(map(_message, self.observation))
        counts = {_name(name): _finite(name, count) for name, count in self.counts.items()}
        for name, value in (("observation", messages), ("counts", counts), ("reward", _finite("reward", self.reward))):
            object.__setattr__(self, name, value)


def storable(text: str) -> str:
    """``text`` with a question mark for each half of a surrogate pair, which JSON can hold and nothing else."""
    return text.encode(errors="replace").decode()


def _message(message: Message) -> Message:
    """A copy of ``message`` that shares nothing with it."""
    if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise ValueError(f"a message has a role and a content, both text, unlike {message!r:.200}")
    role, content = str(message["role"]), str(message["content"])
    others = json.dumps({k: v for k, v in message.items() if k not in ("role", "content")}, ensure_ascii=False)
    for text in (role, content, others):
        text.encode()  # half of a surrogate pair is a ValueError
    return {"role": role, "content": content, **json.loads(others)}


def _name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a count has the name {name!r:.200}, which is no text")
    return name


def _finite(name: str, number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, which is no finite number")
    return float(number)


class Environment(Protocol):
    """One episode. ``tools``: definitions (JSON schema) of what the policy may call, known without an object; or a
    static method that makes them of the options."""

    tools: Sequence[Mapping[str, Any]]

    def reset(self, task: Task) -> None:
        """Begin the episode."""
        ...

    def step(self, action: Action) -> Step:
        """Answer one turn of the policy. May take its time: it runs in a thread of its own, until the turn's limit."""
        ...

    def close(self) -> None:
        """Free what the episode used. Called once, also after a failure."""
        ...

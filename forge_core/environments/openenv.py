"""Environments that are OpenEnv servers (https://github.com/huggingface/OpenEnv).

The adapter speaks OpenEnv's WebSocket protocol, so that nothing needs to be installed where the policy is sampled:
``{"type": "reset", "data": {"seed": …}}`` and ``{"type": "step", "data": action}`` are answered with
``{"type": "observation", "data": {"observation": {…}, "reward": …, "done": …}}`` or ``{"type": "error", …}``.

Invariants:
- An episode is one session of the server, closed with it. A server has a limit of sessions: set
  ``environment.max_open`` no higher, since a session that is refused is a broken environment.
- What the server says to ``reset`` is the prompt (``prompts`` asks for it); an episode whose server says something
  else to the same seed is broken, not played.
- An action that the server's schema refuses is answered with an observation; any other error of the server breaks the
  environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from forge_core.environments.protocol import Action, Step, Task

_NOT_SAID = ("done", "reward", "metadata")
_REFUSED = "VALIDATION_ERROR"  # the server's code for an action that is none
_MAX_MESSAGE = 100 * 2**20  # bytes, as OpenEnv's own client has it


class ServerError(RuntimeError):
    """What the server answered instead of an observation. ``code``: OpenEnv's name of it."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code", "UNKNOWN"))
        super().__init__(f"the OpenEnv server answered {self.code}: {data.get('message', 'no message')}")


class OpenEnv:
    """``url``: of the server (http or ws). ``action``: the field of its action that the policy's text becomes.
    ``observation``: the field of its observation that the policy reads; None: all of them, as JSON. ``role``: of what
    it says. ``reset``: further arguments of the server's reset."""

    tools: tuple[Any, ...] = ()

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str | None = None,
        role: str = "user",
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        self._url, self._action, self._observation, self._role = _socket(url), action, observation, role
        self._reset = dict(reset or {})
        self._connection: ClientConnection | None = None

    def reset(self, task: Task) -> None:
        self._connection = _open(self._url)
        said = _begin(self._connection, {**self._reset, "seed": task.metadata["seed"]}, self._observation)
        if said != task.messages[-1]["content"]:
            raise ValueError(f"the server begins with {said!r:.200}, unlike the prompt: it was made by another server")

    def step(self, action: Action) -> Step:
        assert self._connection is not None
        try:
            answer = _ask(self._connection, "step", {self._action: action.text})
        except ServerError as error:
            if error.code != _REFUSED:
                raise
            return self._say(f"error: this is no valid {self._action}", invalid_moves=1)
        reward, done = float(answer.get("reward") or 0.0), bool(answer.get("done"))
        if done:
            return Step(reward=reward, done=True)
        return self._say(_text(answer["observation"], self._observation), reward)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _say(self, text: str, reward: float = 0.0, **counts: float) -> Step:
        return Step([{"role": self._role, "content": text}], reward, counts=counts)


def prompts(
    url: str,
    size: int = 1000,
    observation: str | None = None,
    reset: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows of episodes, for ``dataset.path: python://forge_core.environments.openenv:prompts``: what the server says to
    ``reset`` with the seeds ``seed`` to ``seed + size - 1``. Give the other options as to the environment."""
    with closing(_open(_socket(url))) as connection:
        return [
            {"prompt": _begin(connection, {**(reset or {}), "seed": number}, observation), "seed": number}
            for number in range(seed, seed + size)
        ]


def _socket(url: str) -> str:
    scheme, separator, rest = url.rstrip("/").partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if not separator or scheme not in schemes:
        raise ValueError(f"url: is {url!r}: must be the address of an OpenEnv server, such as http://127.0.0.1:8000")
    return f"{schemes[scheme]}://{rest}/ws"


def _open(url: str) -> ClientConnection:
    return connect(url, max_size=_MAX_MESSAGE, open_timeout=10)


def _begin(connection: ClientConnection, arguments: Mapping[str, Any], field: str | None) -> str:
    return _text(_ask(connection, "reset", arguments)["observation"], field)


def _ask(connection: ClientConnection, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    try:
        connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(connection.recv())
    except ConnectionClosed as error:
        raise ConnectionError(
            f"the OpenEnv server closed the session ({error}); where it allows no more sessions, lower "
            "environment.max_open"
        ) from error
    if answer.get("type") == "error":
        raise ServerError(answer.get("data", {}))
    found: dict[str, Any] = answer["data"]
    return found


def _text(observation: Mapping[str, Any], field: str | None) -> str:
    if field is not None:
        return str(observation[field])
    return json.dumps({k: v for k, v in observation.items() if k not in _NOT_SAID}, ensure_ascii=False)

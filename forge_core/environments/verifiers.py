"""Environments of the package verifiers (https://github.com/PrimeIntellect-ai/verifiers), versions before 0.2.

A rollout of verifiers asks a client for each reply of the model. Here the client is the policy: a request of the
rollout is the end of a step, and the next action is its reply. So tools, stop conditions and rubric are the package's.

Invariants:
- An environment is loaded once per process; its rollouts share one event loop in a thread of their own. The package's
  signal handlers, which would take Ctrl-C from the run, are not installed.
- What a rollout asks must go on from what was said before: one that rewrites the conversation is broken.
- The reward is the rubric's, its metrics are counts. A rubric that grades groups is refused.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from forge_core.config import ConfigError
from forge_core.environments.packages import required
from forge_core.environments.protocol import Action, Message, Step, Task, ToolCall

REQUIREMENT = "verifiers<0.2"


class VerifiersEnvironment:
    """``environment``: the id of an installed environment, or the module that has its ``load_environment``.
    ``arguments``: of that function."""

    package = "verifiers"

    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._environment = load(environment, arguments)
        self._rollout: _Rollout | None = None

    @staticmethod
    def tools(environment: str, arguments: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        defined = load(environment, arguments).tool_defs or []
        fields = ("name", "description", "parameters")
        return [{"type": "function", "function": {field: tool[field] for field in fields}} for tool in defined]

    def reset(self, task: Task) -> None:
        messages = [dict(message) for message in task.messages]
        self._rollout = _Rollout(self._environment, {**task.metadata["verifiers"], "prompt": messages})
        begun = self._rollout.next()
        if begun is None or [(m["role"], m["content"]) for m in begun] != [(m["role"], m["content"]) for m in messages]:
            raise ValueError("the environment begins with other messages than the prompt")

    def step(self, action: Action) -> Step:
        assert self._rollout is not None
        self._rollout.reply(action)
        if (said := self._rollout.next()) is not None:
            return Step(said)
        state = self._rollout.state
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return Step(reward=float(state["reward"]), done=True, counts=metrics)

    def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()


def prompts(
    environment: str, arguments: Mapping[str, Any] | None = None, size: int = -1, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows of the environment's own data set, for ``dataset.path: python://forge_core.environments.verifiers:prompts``.
    Give ``environment`` and ``arguments`` as to the environment."""
    rows = load(environment, arguments).get_dataset(n=size, seed=seed)
    return [_row(dict(row)) for row in rows]


def load(environment: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """The environment, loaded once per process and arguments. Raises ConfigError."""
    return _load(environment, json.dumps(arguments or {}, sort_keys=True))


@lru_cache(maxsize=8)
def _load(environment: str, arguments: str) -> Any:
    package = required("verifiers", REQUIREMENT)
    if not hasattr(package, "MultiTurnEnv"):
        raise ConfigError(
            f"environment.path: verifiers {package.__version__} runs agents of its own, which speak to a model by "
            f"HTTP and keep no tokens: pip install '{REQUIREMENT}'"
        )
    module = required("verifiers.envs.environment", REQUIREMENT)
    module.signal = SimpleNamespace(signal=lambda *_: None, SIGINT=None, SIGTERM=None)  # type: ignore[attr-defined]
    loaded = package.load_environment(environment, **json.loads(arguments))
    if loaded.requires_group_rollouts:
        raise ConfigError(f"environment.options.environment: the rubric of {environment} grades groups, not episodes")
    return loaded


def _row(row: dict[str, Any]) -> dict[str, Any]:
    messages = [_message(message) for message in row.pop("prompt")]
    return {"prompt": messages, "answer": str(row.get("answer", "")), "verifiers": row}


class _Rollout:
    """One rollout on its way, in the event loop of all of them."""

    def __init__(self, environment: Any, row: dict[str, Any]) -> None:
        self._asked: SimpleQueue[list[Message] | None] = SimpleQueue()  # None: the rollout has ended
        self._known: list[Message] = []  # what was asked last, and the reply
        self._reply: asyncio.Future[Action] | None = None
        self._loop = _loop()
        self._running = asyncio.run_coroutine_threadsafe(self._run(environment, row), self._loop)

    @property
    def state(self) -> Any:
        """The state of a rollout that has ended. Raises what it raised."""
        return self._running.result()

    def next(self) -> list[Message] | None:
        """What the rollout says after what was said before; None when it has ended. Raises what it raised."""
        asked = self._asked.get()
        if asked is None:
            self._running.result()
            return None
        new = len(self._known)
        if [m["content"] for m in asked[:new]] != [m["content"] for m in self._known]:
            raise ValueError("the environment rewrote the conversation: its tokens are not those that were sampled")
        self._known = asked
        return asked[new:]

    def reply(self, action: Action) -> None:
        """Give the policy's turn to the rollout, which has asked for it."""
        assert self._reply is not None
        self._known = [*self._known, {"role": "assistant", "content": action.text}]
        self._loop.call_soon_threadsafe(self._reply.set_result, action)

    def cancel(self) -> None:
        self._running.cancel()

    async def ask(self, messages: Sequence[Any]) -> Action:
        self._reply = asyncio.get_running_loop().create_future()
        self._asked.put([_message(message) for message in messages])
        return await self._reply

    async def _run(self, environment: Any, row: dict[str, Any]) -> Any:
        try:
            state = await environment.rollout(row, _client_class()(self), "policy", {})
            if state["error"] is not None:
                raise state["error"]
            await environment.rubric.score_rollout(state)
            await environment.rubric.cleanup(state)
            return state
        finally:
            self._asked.put(None)


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="forge-verifiers", daemon=True).start()
    return loop


@lru_cache(maxsize=1)
def _client_class() -> Any:
    base: Any = required("verifiers.clients", REQUIREMENT).Client

    class Policy(base):
        """The package's view of a rollout's policy."""

        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> Action:
            action: Action = await self.client.ask(prompt)
            return action

        async def raise_from_native_response(self, response: Action) -> None:
            pass

        async def from_native_response(self, response: Action) -> Any:
            return _response(response)

        async def close(self) -> None:
            pass

    return Policy


def _response(action: Action) -> Any:
    """``action`` as the package has a model's response."""
    types = required("verifiers.types", REQUIREMENT)
    calls = [types.ToolCall(id=f"call{n:05d}", **_call(call)) for n, call in enumerate(action.calls)] or None
    reason = "tool_calls" if calls else "stop"
    message = types.ResponseMessage(content=action.text, tool_calls=calls, finish_reason=reason, is_truncated=False)
    return types.Response(id="", created=0, model="policy", message=message)


def _call(call: ToolCall) -> dict[str, str]:
    """A call that could not be read keeps its error as arguments, which the environment cannot read either."""
    return {"name": call.name, "arguments": call.error or json.dumps(dict(call.arguments))}


def _message(message: Any) -> Message:
    """A message of the package, with its content as text. Raises ValueError for what is not text."""
    content = message["content"]
    if not isinstance(content, str):
        if any(part["type"] != "text" for part in content or ()):
            raise ValueError("a message of the environment holds more than text")
        content = "".join(part["text"] for part in content or ())
    keep = {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    return {"role": message["role"], "content": content, **keep}

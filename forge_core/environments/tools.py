"""Environments whose answers are those of tools: the policy calls, reads, and answers without a call in the end.

Invariants: a tool that fails, is not there or is called wrongly is an observation that says so; the definitions that
the chat template shows are made from the functions' signatures and docstrings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forge_core.data.importing import misfit
from forge_core.environments.protocol import Action, Message, Step, Task, ToolCall, storable

MAX_ANSWER = 4000  # characters of a tool's answer that the policy is shown


TYPES: dict[str, type | tuple[type, ...]] = {  # of JSON schemas
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
}  # fmt: skip


class ToolError(Exception):
    """What a tool raises to say something to the policy."""


def definitions(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """JSON schemas of ``functions``, in the form that chat templates expect. Each needs type hints and a docstring with
    ``Args:``."""
    from transformers.utils import get_json_schema

    return [get_json_schema(function) for function in functions]


def answer(name: str, content: str, number: int) -> Message:
    """The message that answers the call ``number`` of a turn. Some templates ask for an id of nine characters. The
    policy may have written what cannot be stored."""
    name, content = storable(name), storable(content[:MAX_ANSWER])
    return {"role": "tool", "name": name, "tool_call_id": f"call{number % 10**5:05d}", "content": content}


class ToolEnvironment:
    """Base of environments with tools: a subclass names its ``functions``. The episode ends with the first turn that
    calls none of them. ``error``: what a failed call is answered with; ``{error}`` in it is the reason."""

    functions: Sequence[Callable[..., Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, error: str = "error: {error}") -> None:
        self._error = error

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.tools = definitions(cls.functions)

    def reset(self, task: Task) -> None:
        self.task = task

    def step(self, action: Action) -> Step:
        if not action.calls:
            return Step(done=True)
        answers = [self._answer(call, number) for number, call in enumerate(action.calls)]
        counts = {"tool_calls": len(answers), "tool_errors": sum(failed for _, failed in answers)}
        return Step([message for message, _ in answers], counts=counts)

    def close(self) -> None:
        pass

    def _answer(self, call: ToolCall, number: int) -> tuple[Message, bool]:
        """The message that answers ``call``, and whether it failed."""
        try:
            content, failed = self._call(call), False
        except ToolError as error:
            content, failed = self._error.replace("{error}", str(error)), True
        return answer(call.name, content, number), failed

    def _call(self, call: ToolCall) -> str:
        if call.error is not None:
            raise ToolError(call.error)
        known = {function.__name__: function for function in self.functions}
        if call.name not in known:
            raise ToolError(f"there is no tool {call.name!r}; there is {', '.join(known)}")
        function = known[call.name]
        if error := misfit(function, **call.arguments):
            raise ToolError(f"{call.name}: {error}") from error
        self._check_types(call)
        found = function(**call.arguments)
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    def _check_types(self, call: ToolCall) -> None:
        """Arguments of another type than the definition says are the policy's mistake, not the tool's."""
        (definition,) = (tool["function"] for tool in self.tools if tool["function"]["name"] == call.name)
        for name, value in call.arguments.items():
            known = definition["parameters"]["properties"].get(name, {})
            wanted = known.get("type")
            if not isinstance(wanted, str) or wanted not in TYPES or (value is None and known.get("nullable")):
                continue
            is_number = wanted in ("integer", "number")
            if not isinstance(value, TYPES[wanted]) or (is_number and isinstance(value, bool)):
                raise ToolError(f"{call.name}: {name} must be of the type {wanted}")

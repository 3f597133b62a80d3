"""Tool calls in what a policy wrote, in the format that its chat template teaches.

Formats: ``hermes`` (``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, SmolLM),
``qwen_coder`` (``<function=…><parameter=…>…</parameter></function>``: Qwen 3 Coder and later), ``llama``
(``{"name": …, "parameters": {…}}``, Llama 3.1 and later), ``mistral`` (``[TOOL_CALLS][{…}, …]``, and
``[TOOL_CALLS]name[ARGS]{…}`` of later versions), and ``text`` (a pattern of one's own).

Invariants: nothing is evaluated; a call that cannot be read is a call with an error, which the policy is told of; text
without the format's marks holds no call, nor does what is thought before the last ``</think>`` (but in ``text``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from forge_core.config import ConfigError
from forge_core.environments.protocol import ToolCall
from forge_core.rewards.extraction import after_thinking

Parse = Callable[[str], Sequence[ToolCall]]

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_FUNCTION = re.compile(r"<function=([^<>\n]*)>(.*?)(</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"\s*([^\s\[{]+)\[ARGS\]\s*")
_MARKS = (  # in a chat template
    ("qwen_coder", "<function="),
    ("hermes", "<tool_call>"),
    ("mistral", _MISTRAL),
    ("llama", _PYTHON_TAG),
    ("llama", '"parameters": dictionary of argument name'),
)


def parser(
    tool_format: str, chat_template: str | None, pattern: str | None, tools: Sequence[Mapping[str, Any]]
) -> Parse:
    """The parser of ``tool_format`` (``auto``: the one that the chat template teaches). ``pattern``: of ``text``, whose
    named groups are the arguments; the call is of the group ``name``, or of the only one of ``tools``, which are the
    definitions. Raises
    ConfigError when how the model writes calls is not known. Without a template nothing tells it of the tools: then
    only ``text`` will do."""
    if chat_template is None and tool_format != "text":
        raise ConfigError(
            f"environment.tool_format: is {tool_format}, but the model has no chat template (or "
            "dataset.chat_template=false), which would tell it of the tools and of how a call is written: use "
            "tool_format=text with tool_pattern, and dataset.system_prompt or a warm start to teach it"
        )
    found = _recognised(chat_template or "") if tool_format == "auto" else tool_format
    if found == "text":
        return _text_parser(pattern, [tool["function"]["name"] for tool in tools])
    formats: dict[str, Parse] = {"hermes": hermes_calls, "llama": llama_calls, "mistral": mistral_calls}
    parse = formats.get(found) or partial(qwen_coder_calls, tools)
    return lambda text: parse(after_thinking(text))


def _recognised(chat_template: str) -> str:
    for name, mark in _MARKS:
        if mark in chat_template:
            return name
    raise ConfigError(
        "environment.tool_format: the model's chat template shows no format of tool calls that is known here "
        f"({', '.join(dict(_MARKS))}): name it, or use tool_format=text with tool_pattern"
    )


def hermes_calls(text: str) -> list[ToolCall]:
    return [_from_json(body, "arguments") for body in _HERMES.findall(text)]


def llama_calls(text: str) -> list[ToolCall]:
    """A call is the whole message; several are separated by semicolons."""
    rest, decoder = text.strip().removeprefix(_PYTHON_TAG).lstrip(), json.JSONDecoder()
    calls: list[ToolCall] = []
    while rest.startswith("{"):
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall("", error=f"the call is no JSON: {error}")]
        calls.append(_from_value(value, "parameters"))
        rest = rest[end:].lstrip(" ;\n")
    return calls


def mistral_calls(text: str) -> list[ToolCall]:
    _, mark, body = text.partition(_MISTRAL)
    if not mark:
        return []
    if named := _NAMED.match(body):
        return _named_calls(body, named)
    try:
        values, _ = json.JSONDecoder().raw_decode(body.strip())
    except (ValueError, RecursionError) as error:
        return [ToolCall("", error=f"the calls are no JSON: {error}")]
    return [_from_value(value, "arguments") for value in (values if isinstance(values, list) else [values])]


def _named_calls(body: str, named: re.Match[str] | None) -> list[ToolCall]:
    """Calls of the form ``name[ARGS]{…}``, with the mark between them."""
    calls: list[ToolCall] = []
    while named:
        try:
            value, end = json.JSONDecoder().raw_decode(body, named.end())
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall(named[1], error=f"the arguments are no JSON: {error}")]
        calls.append(_from_value({"name": named[1], "arguments": value}, "arguments"))
        body = body[end:].removeprefix(_MISTRAL)
        named = _NAMED.match(body)
    return calls


def qwen_coder_calls(tools: Sequence[Mapping[str, Any]], text: str) -> list[ToolCall]:
    """Values are written as they are; those that ``tools`` want as numbers, lists or objects are JSON."""
    types = {tool["function"]["name"]: tool["function"]["parameters"].get("properties", {}) for tool in tools}
    calls = []
    for name, body, end in _FUNCTION.findall(text):
        wanted = types.get(name.strip(), {})
        given = {k.strip(): _value(v, wanted.get(k.strip(), {}).get("type")) for k, v in _PARAMETER.findall(body)}
        calls.append(ToolCall(name.strip(), given, error=None if end else "the call was cut off"))
    return calls


def _value(text: str, wanted: Any) -> Any:
    if wanted in (None, "string"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the tool says what it takes
        return text


def _from_json(body: str, arguments: str) -> ToolCall:
    try:
        return _from_value(json.loads(body), arguments)
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"the call is no JSON: {error}")


def _from_value(value: Any, arguments: str) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return ToolCall("", error=f'a call is an object with "name" and "{arguments}"')
    given = value.get(arguments, {})
    if isinstance(given, str):  # some write the object as a string
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, error=f'"{arguments}" is no JSON: {error}')
    if not isinstance(given, dict):
        return ToolCall(name, error=f'"{arguments}" must be an object')
    return ToolCall(name, given)


def _text_parser(pattern: str | None, tools: Sequence[str]) -> Parse:
    if pattern is None:
        raise ConfigError("environment.tool_pattern: is missing: tool_format=text needs a regular expression")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"environment.tool_pattern: {pattern!r} is no regular expression: {error}") from error
    if "name" not in compiled.groupindex and len(tools) != 1:
        raise ConfigError(
            f"environment.tool_pattern: needs a group (?P<name>…), since there are {len(tools)} tools to choose from"
        )

    def calls(text: str) -> list[ToolCall]:
        found = []
        for match in compiled.finditer(text):
            groups = {key: value for key, value in match.groupdict().items() if value is not None}
            found.append(ToolCall(groups.pop("name", tools[0] if tools else ""), groups))
        return found

    return calls

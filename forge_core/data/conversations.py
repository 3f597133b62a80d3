"""Rows of any usual layout as chat messages.

Formats, and the columns each needs (``columns`` maps these names to a set's own, also dotted paths into structs):

- ``messages`` (OpenAI): ``messages`` of ``role`` and ``content``, with ``tool_calls``, ``tool_call_id``, ``name`` and
  ``reasoning_content`` where there are any; optionally ``tools``.
- ``sharegpt``: ``conversations`` of ``from`` and ``value``; optionally ``system`` and ``tools``.
- ``alpaca``: ``instruction`` and ``output``; optionally ``input``.
- ``prompt_completion``: ``prompt`` and ``completion``, texts or messages.
- ``text``: ``text``.

Guarantees:
- A row gives the same example every time; what is wrong with it is a DataError that names the row and the column.
- Null fields of messages are left out: Arrow fills the fields that other messages have with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_core.data.errors import DataError
from forge_core.data.layouts import PROMPT_COLUMNS, value_at

Message = dict[str, Any]
# For each format, the names of its columns and the usual columns that hold them; the starred may be missing.
FORMATS: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages",), "tools*": ("tools",)},
    "sharegpt": {"conversations": ("conversations", "conversation"), "system*": ("system",), "tools*": ("tools",)},
    "alpaca": {"instruction": ("instruction",), "output": ("output",), "input*": ("input",)},
    "prompt_completion": {
        "prompt": tuple(name for name in PROMPT_COLUMNS if name != "messages"),
        "completion": ("completion", "response", "answer", "output", "solution"),
    },
    "text": {"text": ("text",)},
}
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "ipython"), "tool"),
}
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Example:
    """What a row says: a conversation with the tools it may use, or a plain text (then no messages)."""

    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    text: str | None = None

    @property
    def before_reply(self) -> list[Message]:
        """Role and content of the messages before the first reply; a text stands for itself."""
        if self.text is not None:
            return [{"role": "user", "content": self.text}]
        replies = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        asked = self.messages[: replies[0]] if replies else self.messages
        return [{"role": message["role"], "content": message.get("content", "")} for message in asked]


@dataclass(frozen=True)
class Converter:
    """Makes examples of rows. ``columns``: where each name of the format is; ``key``: the section's name in errors."""

    format: str
    columns: dict[str, str]
    system_prompt: str | None
    key: str

    def __call__(self, number: int, row: Mapping[str, Any]) -> Example:
        """The example of row ``number``. Raises DataError."""
        values = {name: value_at(row, column) for name, column in self.columns.items()}
        where = f"{self.key}: row {number}"
        if self.format == "text":
            return Example(text=_text(values["text"], f"{where}, column {self.columns['text']!r}"))
        messages = _READERS[self.format](values, where)
        if values.get("system"):
            messages = _with_system(messages, _text(values["system"], f"{where}, system"))
        if self.system_prompt:
            messages = _with_system(messages, self.system_prompt)
        return Example(messages, _tools(values.get("tools"), where))


def choose_converter(
    columns: Sequence[str], format: str, mapped: Mapping[str, str], system_prompt: str | None, *, where: str, key: str
) -> Converter:
    """The converter of a set with these ``columns``. ``mapped``: the user's column map. Raises DataError."""
    candidates = list(FORMATS) if format == "auto" else [format]
    if unknown := [name for name in mapped if not any(name in _names(c) for c in candidates)]:
        known = "; ".join(f"{c}: {', '.join(_names(c))}" for c in candidates)
        raise DataError(f"{key}.columns: no format has {', '.join(unknown)}: the names on the left may be {known}")
    if absent := [column for column in mapped.values() if column.split(".")[0] not in columns]:
        raise DataError(
            f"{key}.columns: {where} has no column {', '.join(absent)}; its columns are {', '.join(columns)}"
        )
    for candidate in candidates:
        found = _resolve(candidate, columns, mapped)
        if set(mapped) <= set(found) and not _lacking(candidate, found):
            return Converter(candidate, found, system_prompt, key)
    raise DataError(_unsuited(columns, format, mapped, where, key))


def _names(format: str) -> list[str]:
    return [name.rstrip("*") for name in FORMATS[format]]


def _resolve(format: str, columns: Sequence[str], mapped: Mapping[str, str]) -> dict[str, str]:
    """The column of each name of ``format`` that has one. Those that rows may lack are where they usually are, whether
    or not the first rows of a stream have them."""
    found = {}
    for name, usual in FORMATS[format].items():
        missing = usual[0] if name.endswith("*") else None
        name = name.rstrip("*")
        column = mapped.get(name) or next((column for column in usual if column in columns), missing)
        if column is not None:
            found[name] = column
    return found


def _lacking(format: str, found: Mapping[str, str]) -> list[str]:
    return [name for name in FORMATS[format] if not name.endswith("*") and name not in found]


def _unsuited(columns: Sequence[str], format: str, mapped: Mapping[str, str], where: str, key: str) -> str:
    have = f"{where} has the columns {', '.join(columns)}"
    if format == "auto":
        return (
            f"{key}.format: {have}, which fit none of {', '.join(FORMATS)}: set {key}.columns, such as "
            f"{key}.columns='{{prompt: {columns[0] if columns else 'question'}, completion: ...}}'"
        )
    missing = _lacking(format, _resolve(format, columns, mapped))
    names = ", ".join(missing)
    return f"{key}.columns: the format {format} needs {names}; {have}: map it: {key}.columns.{missing[0]}=<column>"


def _read_messages(values: Mapping[str, Any], where: str) -> list[Message]:
    return _messages(values["messages"] if "messages" in values else values["conversations"], where)


def _read_alpaca(values: Mapping[str, Any], where: str) -> list[Message]:
    fields = {name: _text(values[name], f"{where}, {name}") for name in ("instruction", "output")}
    extra = values.get("input")
    template = ALPACA_WITH_INPUT if extra else ALPACA
    prompt = template.format(instruction=fields["instruction"], input=extra)
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": fields["output"]}]


def _read_prompt_completion(values: Mapping[str, Any], where: str) -> list[Message]:
    parts = (("prompt", "user"), ("completion", "assistant"))
    read = lambda value, role, name: (
        _messages(value, f"{where}, {name}")
        if isinstance(value, list)
        else [{"role": role, "content": _text(value, f"{where}, {name}")}]
    )
    return [message for name, role in parts for message in read(values[name], role, name)]


_READERS = {
    "messages": _read_messages,
    "sharegpt": _read_messages,
    "alpaca": _read_alpaca,
    "prompt_completion": _read_prompt_completion,
}


def _messages(value: Any, where: str) -> list[Message]:
    if isinstance(value, str):
        value = _parsed(value, where)  # some sets keep the list as JSON text
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: holds {_short(value)}; a conversation is a non-empty list of messages")
    return [_message(entry, f"{where}, message {i}") for i, entry in enumerate(value)]


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping) or not ({"role", "from"} & entry.keys()):
        raise DataError(f"{where}: {_short(entry)} must be an object with role and content (or from and value)")
    name = entry.get("role") or entry.get("from")
    if name not in ROLES:
        raise DataError(f"{where}: unknown role {name!r}: use one of {', '.join(ROLES)}")
    said = entry.get("value") if entry.get("content") is None else entry["content"]
    content = _content(said, where)
    message: Message = {"role": ROLES[name], "content": content}
    if name == "function_call":
        message |= {"content": "", "tool_calls": [_parsed(content, where)]}
    kept = ("tool_calls", "tool_call_id", "name", "reasoning_content")
    message |= {part: entry[part] for part in kept if entry.get(part)}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    elif message["role"] == "assistant" and not content and not message.get("reasoning_content"):
        raise DataError(f"{where}: the reply is empty: give it content or tool_calls, or remove the row")
    elif isinstance(said, list) and said and not content and not message.get("reasoning_content"):
        raise DataError(f"{where}: all parts of the content are empty: give one of them text, or remove the row")
    return message


def _content(value: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, Mapping) and "text" in part for part in value):
        return "".join(_text(part["text"], where) for part in value if part["text"] != "")
    if isinstance(value, Mapping):
        return json.dumps(_without_nulls(value), ensure_ascii=False)
    raise DataError(f"{where}: the content {_short(value)} is no text: only text can be trained on")


def _tool_call(call: Any, where: str) -> Message:
    """OpenAI's form, with the arguments as an object: templates write them themselves."""
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not function.get("name"):
        raise DataError(f"{where}: the tool call {_short(call)} needs a name: {{name: ..., arguments: {{...}}}}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}, arguments of {function['name']}")
    identity = {"id": call["id"]} if call.get("id") else {}
    return {
        **identity,
        "type": "function",
        "function": {"name": function["name"], "arguments": _without_nulls(arguments)},
    }


def _tools(value: Any, where: str) -> list[Any] | None:
    if isinstance(value, str) and value.strip():
        value = _parsed(value, f"{where}, tools")
    if not value:
        return None
    if not isinstance(value, list):
        raise DataError(f"{where}, tools: holds {_short(value)}; it must be a list of tool definitions")
    return [_without_nulls(_parsed(tool, where) if isinstance(tool, str) else tool) for tool in value]


def _with_system(messages: list[Message], content: str) -> list[Message]:
    """``messages`` with this system message, unless they have one."""
    if messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": content}, *messages]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise DataError(f"{where}: holds {_short(value)}; it must be non-empty text: remove the row, or map columns")
    return str(value)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: {_short(text)} is not valid JSON: {error}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

"""Tool calls as models write them, and as they get them wrong."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core.config import ConfigError
from forge_core.environments.tool_calls import hermes_calls, llama_calls, mistral_calls, parser, qwen_coder_calls
from tests.data.tokenizers import CHATML, THINKING


def tools(*names: str) -> list[dict[str, Any]]:
    properties = {"x": {"type": "integer"}, "y": {"type": "string"}, "z": {"type": "array"}}
    return [{"function": {"name": name, "parameters": {"properties": properties}}} for name in names]


def test_hermes_calls_are_read_in_order():
    text = (
        'Let me see.\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "b", "arguments": {"y": "z"}}</tool_call>'
    )
    assert [(c.name, c.arguments, c.error) for c in hermes_calls(text)] == [
        ("a", {"x": 1}, None),
        ("b", {"y": "z"}, None),
    ]


def test_a_call_that_is_cut_off_or_malformed_is_a_call_with_an_error():
    (cut,) = hermes_calls('<tool_call>{"name": "a", "argum')
    assert "no JSON" in (cut.error or "")
    (nameless,) = hermes_calls('<tool_call>{"arguments": {}}</tool_call>')
    assert '"name"' in (nameless.error or "")
    (listed,) = hermes_calls('<tool_call>{"name": "a", "arguments": [1]}</tool_call>')
    assert (listed.name, listed.error) == ("a", '"arguments" must be an object')


def test_arguments_written_as_a_string_of_json_are_read():
    (call,) = hermes_calls('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>')
    assert call.arguments == {"x": 1}


def test_llama_calls_are_the_whole_message():
    assert [
        c.arguments for c in llama_calls('{"name": "a", "parameters": {"x": 1}}; {"name": "a", "parameters": {}}')
    ] == [
        {"x": 1},
        {},
    ]
    assert llama_calls('<|python_tag|>{"name": "a", "parameters": {"x": 1}}')[0].arguments == {"x": 1}
    assert llama_calls('The answer is {"name": 5}') == []


def test_mistral_calls_are_a_list_after_the_mark():
    assert [c.name for c in mistral_calls('[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b"}]')] == ["a", "b"]
    assert mistral_calls("no calls") == []


def test_mistral_calls_of_later_versions_are_named_before_their_arguments():
    calls = mistral_calls('hm[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{"y": "z"}')
    assert [(c.name, c.arguments) for c in calls] == [("a", {"x": 1}), ("b", {"y": "z"})]
    (cut,) = mistral_calls('[TOOL_CALLS]a[ARGS]{"x": ')
    assert (cut.name, "no JSON" in (cut.error or "")) == ("a", True)


def test_qwen_coder_calls_have_values_as_they_are_written():
    text = (
        "<tool_call>\n<function=a>\n<parameter=x>\n3\n</parameter>\n<parameter=y>\n3\n  4\n</parameter>\n"
        "<parameter=z>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    )
    (call,) = qwen_coder_calls(tools("a"), text)
    assert (call.name, call.arguments, call.error) == ("a", {"x": 3, "y": "3\n  4", "z": [1, 2]}, None)
    (wrong,) = qwen_coder_calls(tools("a"), "<function=a><parameter=x>three</parameter></function>")
    assert wrong.arguments == {"x": "three"}
    (cut,) = qwen_coder_calls(tools("a"), "<function=a><parameter=x>1")
    assert cut.error == "the call was cut off"
    assert parser("auto", "<tool_call>\n<function=example>", None, tools("a"))(text) == [call]


@pytest.mark.parametrize("text", ["", "no call", "{1}", "<tool>", "[TOOL]"])
def test_text_without_marks_holds_no_call(text: str):
    assert [*hermes_calls(text), *llama_calls(text), *mistral_calls(text)][:1] in ([], [*llama_calls(text)][:1])
    assert hermes_calls(text) == []
    assert mistral_calls(text) == []


def test_the_format_is_recognised_by_the_chat_template():
    parse = parser("auto", THINKING, None, tools("a"))
    assert parse('<tool_call>{"name": "a", "arguments": {}}</tool_call>')[0].name == "a"
    with pytest.raises(ConfigError, match=r"environment.tool_format: the model's chat template shows no format"):
        parser("auto", CHATML, None, tools("a"))


def test_a_call_that_is_only_thought_of_is_not_made():
    call = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    parse = parser("auto", THINKING, None, tools("a", "b"))
    assert [c.name for c in parse(f"<think>I could write {call % 'a'}, but</think>{call % 'b'}")] == ["b"]
    assert parse(f"<think>I could write {call % 'a'}</think>The answer is 4.") == []


def test_a_pattern_of_ones_own_names_the_arguments():
    parse = parser("text", None, r"\[(?P<expression>[^\]]*)\]", tools("calculate"))
    assert [(c.name, c.arguments) for c in parse("so [1+2] and [3]")] == [
        ("calculate", {"expression": "1+2"}),
        ("calculate", {"expression": "3"}),
    ]
    named = parser("text", None, r"(?P<name>\w+)\((?P<x>\d)\)", tools("f", "g"))
    assert [(c.name, c.arguments) for c in named("g(1)")] == [("g", {"x": "1"})]


@pytest.mark.parametrize(
    ("pattern", "names", "said"),
    [
        (None, ["a"], "tool_pattern: is missing"),
        ("(", ["a"], "is no regular expression"),
        ("x", ["a", "b"], r"needs a group \(\?P<name>…\), since there are 2 tools"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str | None, names: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        parser("text", None, pattern, tools(*names))

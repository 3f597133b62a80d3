"""Rows of the usual layouts as conversations."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from forge_core.data import DataError
from forge_core.data.conversations import Example, choose_converter

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def converted(
    row: dict[str, Any], format: str = "auto", mapped: dict[str, str] | None = None, system: str | None = None
) -> Example:
    convert = choose_converter(list(row), format, mapped or {}, system, where="set", key="dataset")
    return convert(7, row)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": HI},
        {"messages": json.dumps(HI)},
        {"messages": [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in HI]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": HI},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": HI[:1], "completion": "hello"},
        {"prompt": HI[:1], "completion": HI[1:]},
        {"question": "hi", "answer": "hello", "id": 3},
        {"problem": "hi", "solution": "hello"},
    ],
)
def test_every_usual_layout_is_told_by_its_columns(row: dict[str, Any]):
    assert converted(row) == Example(HI)


def test_text_columns_are_plain_texts():
    assert converted({"text": "once", "meta": 1}) == Example(text="once")


def test_alpaca_prompts_differ_by_whether_there_is_an_input():
    row = {"instruction": "Sort {input}", "input": "", "output": "1 2"}
    without, with_input = converted(row), converted(row | {"input": "2 1"})
    assert without.messages[1] == with_input.messages[1] == {"role": "assistant", "content": "1 2"}
    assert "### Input" not in without.messages[0]["content"]
    assert "### Instruction:\nSort {input}\n\n### Response" in without.messages[0]["content"]
    assert "### Input:\n2 1\n" in with_input.messages[0]["content"]
    assert converted({"instruction": "Sort", "output": "1"}).messages[0]["content"].endswith("### Response:\n")


def test_openai_tool_calls_keep_what_templates_need():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "user", "content": "add", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "strict": None}}]
    found = converted({"messages": messages, "tools": json.dumps(tools)})
    assert found.messages[0] == {"role": "user", "content": "add"}
    assert found.messages[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    ]
    assert found.messages[2] == messages[2]
    assert found.messages[3] == messages[3]
    assert found.tools == [{"type": "function", "function": {"name": "add"}}]


def test_arrow_fills_fields_with_nulls_and_they_are_left_out():
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    other = {"function": {"name": "neg", "arguments": {"x": 1}}}
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call, other]}]
    row = pa.Table.from_pylist([{"messages": messages}]).to_pylist()[0]
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "x": None}
    calls = converted(row).messages[1]["tool_calls"]
    assert [c["function"]["arguments"] for c in calls] == [{"a": 2}, {"x": 1}]


def test_of_rows_with_both_kinds_of_names_arrow_fills_the_others_with_nulls():
    mixed = [{"from": "human", "value": "hi"}, {"role": "assistant", "content": "hello"}]
    row = pa.Table.from_pylist([{"messages": HI}, {"messages": mixed}, {"messages": [*HI, *mixed]}]).to_pylist()[2]
    assert row["messages"][2] == {"role": None, "content": None, "from": "human", "value": "hi"}
    assert converted(row).messages == [*HI, *HI]
    calls = [{"function": {"name": "add", "arguments": "{}"}}, {"function": None, "name": "neg", "arguments": "{}"}]
    said = converted({"messages": [HI[0], {"role": "assistant", "tool_calls": calls}]})
    assert [call["function"]["name"] for call in said.messages[1]["tool_calls"]] == ["add", "neg"]


def test_parts_of_a_message_may_be_empty_when_others_are_not():
    parts = [{"type": "text", "text": text} for text in ("", "he", "", "llo")]
    assert converted({"messages": [HI[0], {"role": "assistant", "content": parts}]}) == Example(HI)
    call = {"function": {"name": "add", "arguments": {}}}
    said = converted({"messages": [HI[0], {"role": "assistant", "content": parts[:1], "tool_calls": [call]}]})
    assert said.messages[1]["content"] == ""


def test_sharegpt_function_calls_and_its_system_column():
    conversation = [
        {"from": "human", "value": "add"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2"},
    ]
    found = converted({"conversations": conversation, "system": "be brief"})
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}


def test_a_system_prompt_is_for_conversations_without_one():
    assert converted({"messages": HI}, system="s").messages == [{"role": "system", "content": "s"}, *HI]
    own = [{"role": "system", "content": "own"}, *HI]
    assert converted({"messages": own}, system="s").messages == own


def test_columns_are_mapped_also_into_structs():
    row = {"q": "hi", "a": {"best": "hello"}, "text": "noise"}
    assert converted(row, mapped={"prompt": "q", "completion": "a.best"}) == Example(HI)
    assert converted({"x": "once", "messages": HI}, "text", {"text": "x"}) == Example(text="once")


@pytest.mark.parametrize(
    ("columns", "format", "mapped", "message"),
    [
        (["x", "y"], "auto", {}, r"dataset\.format: set has the columns x, y, which fit none of messages, sharegpt"),
        (
            ["x", "output"],
            "alpaca",
            {},
            r"dataset\.columns: the format alpaca needs instruction; .*columns\.instruction=",
        ),
        (["q", "a"], "alpaca", {"instruction": "q"}, r"needs output"),
        (["q"], "auto", {"prompt": "nope"}, r"dataset\.columns: set has no column nope; its columns are q"),
        (["q"], "alpaca", {"prompt": "q"}, r"no format has prompt: .* alpaca: instruction, output, input"),
        (["q"], "auto", {"prompt": "q"}, r"fit none of"),
    ],
)
def test_columns_that_do_not_suit_say_what_is_needed(columns: list, format: str, mapped: dict, message: str):
    with pytest.raises(DataError, match=message):
        choose_converter(columns, format, mapped, None, where="set", key="dataset")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, r"row 7: holds \[\]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"message 0: unknown role 'wizard'"),
        ({"messages": [{"content": "x"}]}, r"must be an object with role and content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"is no text"),
        ({"messages": [HI[0], {"role": "assistant", "content": ""}]}, r"message 1: the reply is empty"),
        ({"messages": [{"role": "user", "content": [{"text": ""}]}, HI[1]]}, r"message 0: all parts .* are empty"),
        ({"messages": [HI[0], {"role": "assistant", "content": [{"text": ""}]}]}, r"message 1: the reply is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": None}]}, HI[1]]}, r"holds None"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"x": 1}]}]}, r"tool call .* needs a name"),
        ({"messages": "{not json"}, r"is not valid JSON"),
        ({"prompt": "hi", "completion": None}, r"row 7, completion: holds None"),
        ({"instruction": "", "output": "x"}, r"row 7, instruction: holds ''"),
        ({"text": ["a"]}, r"row 7, column 'text'"),
        ({"messages": HI, "tools": {"a": 1}}, r"tools: holds .* must be a list"),
    ],
)
def test_a_row_that_is_wrong_is_named(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        converted(row)

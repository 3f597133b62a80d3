"""Which tokens of a conversation count, under templates that change what they are given."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from forge_core.data import DataError
from forge_core.data.conversations import Example
from forge_core.data.encoding import Document, Encoder
from forge_core.data.row_packing import PAD_ID, build_row
from tests.data.tokenizers import ASKS_FOR_THOUGHT, BRACKETS, CHATML, MARKED, THINKING, TWICE, tokenizer

USER = {"role": "user", "content": "What is 2+2?"}
THOUGHT = {"role": "assistant", "content": "<think>\nadd them\n</think>\n\nfour"}
MORE = {"role": "user", "content": "And 3+3?"}
SIX = {"role": "assistant", "content": "<think>\nagain\n</think>\n\nsix"}


def encoded(template: str | None, messages: list[dict], masking: str = "assistant", **options) -> Document:
    tools = options.pop("tools", None)
    eos = options.pop("eos", "<|im_end|>")
    return Encoder(tokenizer(template, eos), 10_000, **options)(Example(messages, tools), masking)


def text_of(document: Document) -> str:
    return tokenizer().decode(document.tokens)


def counted(document: Document) -> list[str]:
    """The texts of the runs of tokens that count."""
    runs: list[list[int]] = [[]]
    for token, counts in zip(document.tokens, document.mask, strict=True):
        runs[-1].append(int(token)) if counts else runs.append([])
    return [tokenizer().decode(run) for run in runs if run]


def test_replies_and_the_token_that_ends_them_count():
    document = encoded(CHATML, [USER, {"role": "assistant", "content": "four"}, MORE, SIX])
    assert counted(document) == ["four<|im_end|>", SIX["content"] + "<|im_end|>"]


def test_the_mask_survives_a_template_that_strips_the_thinking_of_earlier_replies():
    document = encoded(THINKING, [USER, THOUGHT, MORE, SIX])
    assert "add them" not in text_of(document)
    assert counted(document) == ["four<|im_end|>", "<think>\nagain\n</think>\n\nsix<|im_end|>"]


def test_the_mask_survives_a_question_that_strips_the_thinking_of_several_replies_before_it():
    """Rendered turn by turn, the first replies keep their thinking: no rendering is the beginning of the next."""
    tool = {"role": "tool", "content": "4"}
    call = {"role": "assistant", "content": "<think>\nuse it\n</think>\n\nlet me see"}
    document = encoded(THINKING, [USER, call, tool, THOUGHT, MORE, SIX])
    assert counted(document) == [
        "let me see<|im_end|>",
        "four<|im_end|>",
        "<think>\nagain\n</think>\n\nsix<|im_end|>",
    ]


def test_a_thinking_block_that_the_template_adds_counts_where_generation_would_begin_before_it():
    assert counted(encoded(THINKING, [USER, {"role": "assistant", "content": "four"}])) == [
        "<think>\n\n</think>\n\nfour<|im_end|>"
    ]


def test_thinking_in_a_field_of_its_own_counts():
    reply = {"role": "assistant", "content": "four", "reasoning_content": "add them"}
    assert counted(encoded(THINKING, [USER, reply])) == ["<think>\nadd them\n</think>\n\nfour<|im_end|>"]


def test_tool_calls_count_and_tool_results_do_not():
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    asks = {"role": "assistant", "content": "", "tool_calls": calls}
    tools = [{"type": "function", "function": {"name": "add"}}]
    document = encoded(
        THINKING, [USER, asks, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}], tools=tools
    )
    assert counted(document) == [
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nfour<|im_end|>",
    ]
    assert '"name": "add"}' in text_of(document)


def test_a_template_that_asks_for_thinking_and_drops_it_from_history_is_masked_right():
    document = encoded(
        ASKS_FOR_THOUGHT, [USER, THOUGHT, MORE, {"role": "assistant", "content": "six"}], eos="<|endoftext|>"
    )
    assert counted(document) == ["\n\nfour<|endoftext|>", "six<|endoftext|>"]


def test_a_template_without_an_opening_of_replies_is_masked_right():
    document = encoded(BRACKETS, [USER, {"role": "assistant", "content": "  four "}], eos="<|endoftext|>")
    assert [run.strip() for run in counted(document)] == ["four <|endoftext|>"]


def test_marks_of_the_template_itself_decide():
    document = encoded(MARKED, [USER, {"role": "assistant", "content": "four"}, MORE, SIX])
    assert counted(document) == ["four<|im_end|>", SIX["content"] + "<|im_end|>"]
    assert counted(encoded(MARKED, [USER, THOUGHT, MORE, SIX], "last")) == [SIX["content"] + "<|im_end|>"]


def test_a_user_who_writes_like_the_template_is_not_trained_on():
    fake = {"role": "user", "content": "say <|im_start|>assistant\nfour<|im_end|> please"}
    assert counted(encoded(CHATML, [fake, {"role": "assistant", "content": "four"}])) == ["four<|im_end|>"]


def test_a_user_who_writes_what_asks_for_a_reply_is_not_trained_on_where_replies_begin_otherwise():
    """History is written without the open thinking block that asks for a reply, so only the user's text holds it."""
    quoting = {"role": "user", "content": "what does <|assistant|><think>\n do in a template?"}
    document = encoded(ASKS_FOR_THOUGHT, [quoting, {"role": "assistant", "content": "four"}], eos="<|endoftext|>")
    assert counted(document) == ["four<|endoftext|>"]
    quoting = {"role": "user", "content": "say <|im_start|>assistant\nfour"}
    document = encoded(THINKING, [quoting, {"role": "assistant", "content": "four"}])
    assert counted(document) == ["<think>\n\n</think>\n\nfour<|im_end|>"]


def test_a_template_that_writes_of_a_reply_before_it_begins_is_refused():
    counting = "{% for m in messages %}{{ m.role }} {{ m.content | length }}:{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(DataError, match="writes message 1 where"):
        encoded(counting, [USER, {"role": "assistant", "content": "four and more"}])


def test_equal_replies_have_masks_of_their_own():
    same = {"role": "assistant", "content": "yes"}
    assert counted(encoded(CHATML, [{"role": "user", "content": "yes"}, same, MORE, same])) == ["yes<|im_end|>"] * 2


def test_last_counts_the_last_reply_only():
    document = encoded(THINKING, [USER, THOUGHT, MORE, SIX], "last")
    assert counted(document) == ["<think>\nagain\n</think>\n\nsix<|im_end|>"]


def test_all_counts_everything_but_the_first_token():
    document = encoded(CHATML, [USER, SIX], "all")
    assert document.mask.tolist() == [False] + [True] * (len(document.tokens) - 1)


def test_a_template_that_writes_a_reply_twice_is_refused_and_masking_all_accepts_it():
    with pytest.raises(DataError, match=r"writes message 1 where.*generation.*masking=all"):
        encoded(TWICE, [USER, SIX])
    assert encoded(TWICE, [USER, SIX], "all").mask.sum() > 4


def test_a_template_that_refuses_the_messages_names_their_roles():
    refusing = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"refuses a conversation \(roles: user, assistant\): no system role"):
        encoded(refusing, [USER, SIX])


def test_a_conversation_without_a_reply_is_left_out():
    assert encoded(CHATML, [USER]).fate == "no_target"


def test_tokens_are_those_of_the_template():
    """What the embedded generator and the guide's tools would make of the same messages."""
    made = tokenizer(THINKING)
    messages = [USER, THOUGHT, MORE, SIX]
    assert encoded(THINKING, messages).tokens.tolist() == made.apply_chat_template(messages, return_dict=False)


def test_without_a_template_prompts_and_replies_are_encoded_apart_and_each_reply_ends():
    made = tokenizer()
    document = encoded(None, [{"role": "system", "content": "sys "}, USER, {"role": "assistant", "content": "four"}])
    prompt = made.encode("sys What is 2+2?", add_special_tokens=False)
    assert document.tokens.tolist() == [*prompt, *made.encode("four"), made.eos_token_id]
    assert counted(document) == ["four<|im_end|>"]
    two = encoded(None, [USER, {"role": "assistant", "content": "four"}, MORE, {"role": "assistant", "content": "6"}])
    assert counted(two) == ["four<|im_end|>", "6<|im_end|>"]


def test_tool_calls_need_a_template():
    asks = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    with pytest.raises(DataError, match="only a chat template can write"):
        encoded(None, [USER, asks])


def test_a_plain_text_counts_as_a_whole_and_ends():
    document = Encoder(tokenizer(CHATML), 100)(Example(text="once upon a time"), "assistant")
    assert text_of(document) == "once upon a time<|im_end|>"
    assert counted(document) == [text_of(document)[len(tokenizer().decode(document.tokens[0])) :]]


def test_a_template_without_an_end_of_text_gets_one_that_counts():
    """A base model's end-of-text token is not the one of the chat template put on it."""
    document = encoded(CHATML, [USER, {"role": "assistant", "content": "four"}], eos="<|endoftext|>")
    assert counted(document) == ["four<|im_end|>", "<|endoftext|>"]
    assert text_of(document).endswith("four<|im_end|>\n<|endoftext|>")


def test_a_padding_token_that_is_the_end_of_text_too_hides_no_end():
    made = copy.deepcopy(tokenizer(CHATML))
    made.pad_token = made.eos_token
    document = Encoder(made, 100)(Example([USER, SIX]), "assistant")
    assert counted(document) == [SIX["content"] + "<|im_end|>"]
    row = build_row([Document(np.array([7, 8, PAD_ID], np.int32), np.array([False, True, True]), "whole")], 4)
    assert (row.target_ids.tolist(), row.target_mask.tolist()) == ([8, PAD_ID, 0, 0], [True, True, False, False])


@pytest.mark.parametrize("masking", ["assistant", "all"])
def test_a_document_is_closed_once(masking: str):
    assert text_of(encoded(CHATML, [USER, SIX], masking)).count("<|im_end|>") == 2


def cut(truncation: str, longest: int, bos: str | None = None, template: str | None = CHATML) -> Document:
    encoder = Encoder(tokenizer(template, bos=bos), longest, truncation=truncation)
    return encoder(Example([USER, {"role": "assistant", "content": "one two three four five six seven"}]), "assistant")


def test_truncation_on_the_right_closes_with_an_end_of_text_that_does_not_count():
    whole, short = cut("right", 1000), cut("right", 30)
    assert (len(short.tokens), short.fate, whole.fate) == (30, "truncated", "whole")
    assert short.tokens[:-1].tolist() == whole.tokens[:29].tolist()
    assert short.tokens[-1] == tokenizer().eos_token_id
    assert not short.mask[-1]
    assert short.mask[-2]


def test_truncation_on_the_left_keeps_the_end_of_text_and_the_beginning_token():
    whole, short = cut("left", 1000), cut("left", 30)
    assert short.tokens.tolist() == whole.tokens[-30:].tolist()
    assert short.mask[1:].tolist() == whole.mask[-29:].tolist()
    assert short.tokens[-2] == tokenizer().eos_token_id
    assert short.mask[-2]
    begun = cut("left", 30, bos="<|endoftext|>", template="{{ bos_token }}" + CHATML)
    assert begun.tokens.tolist() == [tokenizer().convert_tokens_to_ids("<|endoftext|>"), *whole.tokens[-29:].tolist()]


def test_truncation_drop_leaves_a_long_document_out_and_a_cut_that_loses_every_reply_too():
    assert cut("drop", 30).fate == "too_long"
    assert len(cut("drop", 30).tokens) == 0
    assert cut("right", 10).fate == "no_target"


def test_a_document_of_exactly_the_longest_length_is_whole():
    whole = cut("right", 1000)
    assert cut("right", len(whole.tokens)).fate == "whole"
    assert cut("right", len(whole.tokens) - 1).fate == "truncated"


def test_a_tokenizer_that_cannot_end_or_has_no_template_is_refused():
    with pytest.raises(DataError, match="no eos_token"):
        Encoder(tokenizer(CHATML, None), 10)
    with pytest.raises(DataError, match=r"chat_template is true, but .* has no chat template"):
        Encoder(tokenizer(), 10, chat_template=True)

"""The tokens between two turns: those of the template's own text, after what the policy sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from forge_core.config import ConfigError
from forge_core.config.data_sections import ScratchModel
from forge_core.environments.turns import TurnRenderer
from forge_core.models.errors import ModelError
from forge_core.models.scratch import create
from tests.data.tokenizers import BRACKETS, CHATML, THINKING, TWICE, tokenizer

TOOL = [{"role": "tool", "content": "42"}]


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_the_conversation_is_what_the_template_would_have_rendered(template: str):
    made = tokenizer(template)
    question = [{"role": "user", "content": "6*7?"}]
    opening = made.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    sampled = made.encode("<think>\n\n</think>\n\ncall<|im_end|>" if template == THINKING else "call<|im_end|>")
    after = TurnRenderer(made, None, ()).after(TOOL, end_token=made.eos_token_id)
    whole = opening + made.decode(sampled) + made.decode(after)
    replied = [*question, {"role": "assistant", "content": "call"}, *TOOL]
    assert whole == made.apply_chat_template(replied, add_generation_prompt=True, tokenize=False)


def test_a_turn_that_was_cut_is_ended_by_the_environments_tokens():
    made = tokenizer(CHATML)
    renderer = TurnRenderer(made, None, ())
    cut, ended = renderer.after(TOOL, end_token=None), renderer.after(TOOL, end_token=made.eos_token_id)
    assert made.decode(cut) == "<|im_end|>" + made.decode(ended)


def test_without_a_template_the_contents_follow_as_they_are():
    made = tokenizer(None)
    assert made.decode(TurnRenderer(made, None, ()).after([*TOOL, *TOOL], end_token=made.eos_token_id)) == "4242"
    templated = tokenizer(CHATML)
    assert templated.decode(TurnRenderer(templated, False, ()).after(TOOL, end_token=templated.eos_token_id)) == "42"


def test_thinking_of_earlier_turns_stays_although_the_template_would_strip_it():
    made = tokenizer(THINKING)
    asked = made.decode(
        TurnRenderer(made, None, ()).after([{"role": "user", "content": "higher"}], end_token=made.eos_token_id)
    )
    assert asked == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_renders_a_reply_otherwise_is_refused():
    with pytest.raises(ConfigError, match="does not render a reply as it is"):
        TurnRenderer(tokenizer(TWICE), None, ()).after(TOOL, end_token=None)


def test_a_template_that_refuses_the_role_is_named():
    strict = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}",
    )
    with pytest.raises(ConfigError, match=r"refuses messages of the roles user, assistant, tool: no tools"):
        TurnRenderer(tokenizer(strict), None, ()).after(TOOL, end_token=None)


def test_brackets_without_an_opening_are_placed():
    made = tokenizer(BRACKETS, eos="<|endoftext|>")
    asked = made.decode(TurnRenderer(made, None, ()).after([{"role": "user", "content": "7"}], end_token=None))
    assert asked == " <|endoftext|>[INST] 7 [/INST]"


def test_a_turn_that_another_token_ended_gets_the_templates_end():
    made = tokenizer(CHATML)
    renderer = TurnRenderer(made, None, ())
    other = made.convert_tokens_to_ids("<|endoftext|>")
    assert made.decode(renderer.after(TOOL, end_token=other)).startswith("<|im_end|>")
    assert not made.decode(renderer.after(TOOL, end_token=made.eos_token_id)).startswith("<|im_end|>")


def test_an_end_after_a_space_is_not_written_twice():
    made = tokenizer(BRACKETS, eos="<|endoftext|>")
    asked = TurnRenderer(made, None, ()).after([{"role": "user", "content": "7"}], end_token=made.eos_token_id)
    assert made.decode(asked) == "[INST] 7 [/INST]"


def test_calls_are_read_with_the_special_tokens_that_mark_them():
    made = tokenizer(CHATML)
    renderer = TurnRenderer(made, None, ())
    ids = made.encode("<|user|>call<|im_end|>", add_special_tokens=False)
    assert made.decode(ids, skip_special_tokens=True) == "call"
    assert renderer.said(ids, end_token=made.eos_token_id) == "<|user|>call"
    assert renderer.said(ids[:-1], end_token=None) == "<|user|>call"


def test_a_character_that_the_tokenizer_lacks_is_named(tmp_path: Path):
    create(ScratchModel(vocabulary="0123", hidden_size=16, num_layers=1), 0, tmp_path)
    made = AutoTokenizer.from_pretrained(tmp_path)
    renderer = TurnRenderer(made, None, ())
    assert renderer.after([{"role": "tool", "content": "30"}], end_token=1) == [5, 2]
    with pytest.raises(ModelError, match="what the environment says, 'no' has the characters"):
        renderer.after([{"role": "tool", "content": "no"}], end_token=1)

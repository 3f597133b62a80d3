"""Prompts as tokens, with real tokenizers made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_core.data import DataError, render
from forge_core.data.prompts import Prompt

pytestmark = pytest.mark.engine  # imports transformers

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<bos>": 0, **{char: i for i, char in enumerate("abcdefghijklmnopqrstuvwxyz<>?+= ", 1)}}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=characters, bos_token="<bos>", unk_token="?")


@pytest.fixture
def chat_tokenizer(tokenizer: Any) -> Any:
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


def prompt(*contents: str, role: str = "user") -> Prompt:
    return Prompt(4, "0" * 16, [{"role": role, "content": content} for content in contents], None, "t")


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_without_a_template_the_text_stays_as_it_is_without_special_tokens(tokenizer: Any):
    assert text_of(tokenizer, render(prompt("a+b="), tokenizer, None)) == "a+b="
    assert text_of(tokenizer, render(prompt("be brief ", "a+b="), tokenizer, False)) == "be brief a+b="


def test_the_template_opens_the_assistants_turn(chat_tokenizer: Any):
    for chat_template in (None, True):
        ids = render(prompt("hi"), chat_tokenizer, chat_template)
        assert text_of(chat_tokenizer, ids) == "<u>hi<a>"
        assert all(type(token) is int for token in ids)


def test_a_template_can_be_turned_off(chat_tokenizer: Any):
    assert text_of(chat_tokenizer, render(prompt("hi"), chat_tokenizer, False)) == "hi"


def test_asking_for_a_template_that_is_not_there_is_an_error(tokenizer: Any):
    with pytest.raises(DataError, match=r"dataset\.chat_template is true, but the model's tokenizer has no chat"):
        render(prompt("hi"), tokenizer, True)


def test_a_template_that_refuses_a_role_is_an_error(chat_tokenizer: Any):
    with pytest.raises(DataError, match=r"refuses row 4 \(roles: system\): no system role.*dataset\.system_prompt"):
        render(prompt("hi", role="system"), chat_tokenizer, None)


def test_long_prompts_are_never_truncated(tokenizer: Any):
    tokenizer.model_max_length = 16
    assert len(render(prompt("a" * 5000), tokenizer, None)) == 5000


def test_a_prompt_without_tokens_is_an_error(tokenizer: Any):
    with pytest.raises(DataError, match="row 4 renders to no token"):
        render(prompt(""), tokenizer, None)


def test_a_name_of_the_package_is_not_hidden_by_a_module_of_that_name():
    import forge_core.data as package
    import forge_core.data.prompts  # noqa: F401  # imports all modules of the package that it needs

    modules = {file.stem for file in Path(package.__file__).parent.glob("*.py")}
    assert not modules & set(package.__all__)
    assert callable(package.render)

"""Prompts as tokens.

Guarantee: what ``render`` returns is the whole prompt; nothing is truncated (callers count and drop long prompts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_core.data.errors import DataError

if TYPE_CHECKING:
    from forge_core.data.prompts import Prompt


def render(
    prompt: Prompt, tokenizer: Any, chat_template: bool | None, tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Token ids of ``prompt`` for a transformers tokenizer.

    With a chat template: the messages, then the opening of the assistant's turn; ``tools`` are definitions that it
    shows the model. Without: the contents of the messages put together as they are, no special token.
    ``chat_template`` None applies the tokenizer's template exactly when it has one. Raises DataError when True is asked
    of a tokenizer without one, when the template refuses the messages, or when nothing is left.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat_template and not has_template:
        raise DataError(
            "dataset.chat_template is true, but the model's tokenizer has no chat template: set it to false (the "
            "prompt is then plain text) or use a chat model"
        )
    if has_template and chat_template is not False:
        ids = _apply_template(prompt, tokenizer, tools)
    else:
        text = "".join(message["content"] for message in prompt.messages)
        ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise DataError(f"dataset: row {prompt.row} renders to no token at all; remove it or set prompt_template")
    return list(ids)


def _apply_template(prompt: Prompt, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> list[int]:
    import jinja2

    try:
        return tokenizer.apply_chat_template(
            prompt.messages, tools=list(tools) or None, add_generation_prompt=True, return_dict=False
        )
    except jinja2.TemplateError as error:  # for example a template that knows no system role
        roles = ", ".join(message["role"] for message in prompt.messages)
        raise DataError(
            f"dataset: the model's chat template refuses row {prompt.row} (roles: {roles}): {error}. Remove "
            "dataset.system_prompt, or set dataset.chat_template=false"
        ) from error

"""The tokens between two turns of the policy: what an environment says, and the opening of the next turn.

Guarantees:
- Token-in, token-out: what the policy sampled is never rendered or tokenised again. The tokens of an observation are
  those of the text that the chat template puts after an assistant's message.
- A template that cannot place an observation there is refused. One that would strip the thinking of earlier turns strips
  nothing: the policy goes on from the tokens that it sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge_core.data.errors import DataError
from forge_core.environments.protocol import Message

_MARK = "\u241e reply \u241e"  # a text that no template writes
_QUESTION: Message = {"role": "user", "content": "?"}
_REPLY: Message = {"role": "assistant", "content": _MARK}


class TurnRenderer:
    """For one tokenizer. ``chat_template`` as in :func:`forge_core.data.render.render`: without a template the contents
    of an observation follow the policy's tokens as they are."""

    def __init__(self, tokenizer: Any, chat_template: bool | None, tools: Sequence[Any]) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)
        self._templated = bool(getattr(tokenizer, "chat_template", None)) and chat_template is not False
        self._end = tokenizer.eos_token or ""

    def after(self, observation: Sequence[Message], *, ended: bool) -> list[int]:
        """Token ids of ``observation`` and of the opening of the next turn. ``ended``: the policy sampled the token
        that ends its turn; otherwise it is written here. Raises DataError when the template refuses the messages."""
        if not self._templated:
            text = "".join(str(message["content"]) for message in observation)
        else:
            text = self._tail(observation)
            if ended and text.startswith(self._end):
                text = text[len(self._end) :]
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _tail(self, observation: Sequence[Message]) -> str:
        """The text after an assistant's reply."""
        whole = self._render([_QUESTION, _REPLY, *observation])
        if whole.count(_MARK) != 1:
            raise DataError(
                "environment: the model's chat template does not render a reply as it is, so the tokens of a turn "
                "cannot be kept: use another template (tokenizer), or dataset.chat_template=false"
            )
        return whole.partition(_MARK)[2]

    def _render(self, messages: Sequence[Message]) -> str:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=self._tools or None, add_generation_prompt=True, tokenize=False
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"environment: the model's chat template refuses messages of the roles {roles}: {error}. An "
                "environment must answer in roles that it knows, such as user"
            ) from error

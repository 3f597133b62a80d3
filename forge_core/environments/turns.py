"""The tokens between two turns of the policy: what an environment says, and the opening of the next turn.

Guarantees:
- Token-in, token-out: what the policy sampled is never rendered or tokenised again. The tokens of an observation are
  those of the text that the chat template puts after an assistant's message.
- A template that cannot place an observation there is refused. One that would strip the thinking of earlier turns
  strips nothing: the policy goes on from the tokens that it sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from forge_core.config import ConfigError
from forge_core.environments.protocol import Message
from forge_core.models.scratch import check_encodable

_MARK = "\u241e reply \u241e"  # a text that no template writes
_QUESTION: Message = {"role": "user", "content": "?"}
_REPLY: Message = {"role": "assistant", "content": _MARK}


class TurnRenderer:
    """For one tokenizer. ``chat_template`` as in ``forge_core.data.rendering.render``: without a template the contents
    of an observation follow the policy's tokens as they are."""

    def __init__(self, tokenizer: Any, chat_template: bool | None, tools: Sequence[Any]) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)
        self._templated = bool(getattr(tokenizer, "chat_template", None)) and chat_template is not False

    @property
    def template(self) -> str | None:
        """The chat template that prompts have."""
        return self._tokenizer.get_chat_template(tools=self._tools or None) if self._templated else None

    def check_tools(self) -> None:
        """Raise ConfigError when the template does not show the tools to the model."""
        with_tools, without = self._render([_QUESTION]), self._render([_QUESTION], shown=False)
        names = [tool["function"]["name"] for tool in self._tools]
        if missing := [name for name in names if with_tools.count(name) <= without.count(name)]:
            raise ConfigError(
                f"environment.path: the model's chat template does not show the tools ({', '.join(missing)}) that the "
                "environment has: use a model whose template does, or describe them in dataset.system_prompt and set "
                "environment.tool_format=text with environment.tool_pattern"
            )

    def check_observation(self, message: Message) -> None:
        """Raise ConfigError when the template does not show what an environment says in messages like this one."""
        if not message["content"] or message["content"] not in self._tail([message]):
            raise ConfigError(
                f"environment.path: the model's chat template does not show messages of the role {message['role']}, so "
                "the model would not read what the environment says: use a model whose template does, or an "
                "environment that answers in a role that it shows, such as user"
            )

    def after(self, observation: Sequence[Message], *, end_token: int | None) -> list[int]:
        """Token ids of ``observation`` and of the opening of the next turn. ``end_token``: with which the policy ended
        its turn; None (it was cut), or another than the template's: that is written here. Raises ConfigError when the
        template refuses the messages, ModelError for a character that a character tokenizer lacks."""
        if not self._templated:
            text = "".join(message["content"] for message in observation)
        else:
            text = self._tail(observation)
            text = self._without_end(text, end_token)
        check_encodable(self._tokenizer, text, "what the environment says,")
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def most_characters(self, tokens: int) -> int:
        """A text of more characters has more than ``tokens`` tokens."""
        return tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        """In characters."""
        return max(map(len, self._tokenizer.get_vocab()))

    def said(self, token_ids: Sequence[int], *, end_token: int | None) -> str:
        """The text of a turn with the special tokens in it, which may mark a call, but not the one that ends it."""
        ended = end_token is not None and end_token in self._tokenizer.all_special_ids
        return str(self._tokenizer.decode(token_ids[:-1] if ended else token_ids))

    def _without_end(self, tail: str, end_token: int | None) -> str:
        """``tail`` without the end of the turn that the policy has sampled; some templates put a space before it."""
        end = "" if end_token is None else self._tokenizer.decode([end_token])
        stripped = tail.lstrip(" ")
        return stripped[len(end) :] if end and stripped.startswith(end) else tail

    def _tail(self, observation: Sequence[Message]) -> str:
        """The text after an assistant's reply."""
        whole = self._render([_QUESTION, _REPLY, *observation])
        if whole.count(_MARK) != 1:
            raise ConfigError(
                "environment: the model's chat template does not render a reply as it is, so the tokens of a turn "
                "cannot be kept: use another template (tokenizer), or dataset.chat_template=false"
            )
        return whole.partition(_MARK)[2]

    def _render(self, messages: Sequence[Message], *, shown: bool = True) -> str:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=(self._tools or None) if shown else None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"environment: the model's chat template refuses messages of the roles {roles}: {error}. An "
                "environment must answer in roles that it knows, such as user"
            ) from error

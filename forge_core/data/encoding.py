"""Examples as tokens, with a mask that says which of them count in the loss.

Guarantees:
- With a chat template the tokens are those of the whole conversation rendered once, as the template writes it; the mask
  covers what the assistant writes and the token that ends its turn. Without one, prompts and replies are encoded
  apart, as a prompt and its sampled response are, and an end-of-text token follows each reply.
- A document whose last message is a reply has an end-of-text token that counts, so the model learns to stop.
- A document that is too long is cut or left out as ``truncation`` says, and its fate says so. ``right`` closes what is
  left with an end-of-text token that does not count: stopping there is not what the data show. ``left`` keeps the
  end, and a beginning-of-text token.
- A document without a token that counts is left out, with that fate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import numpy as np

from forge_core.data.conversations import Example
from forge_core.data.errors import DataError
from forge_core.data.reply_spans import reply_spans

Fate = Literal["whole", "truncated", "too_long", "no_target"]
Run = tuple[int, int]  # first token, and the one behind the last
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Document:
    """``tokens`` int32 ``[n]``; ``mask`` bool ``[n]``: whether predicting that token counts (entry 0 never does).
    Both are empty where the fate says that the document is left out."""

    tokens: np.ndarray
    mask: np.ndarray
    fate: Fate


@dataclass(frozen=True)
class Encoder:
    """Makes documents of examples. It can be sent to other processes.

    ``tokenizer``: a fast one of transformers. ``longest``: tokens of a document, at most.
    """

    tokenizer: Any
    longest: int
    chat_template: bool | None = None
    truncation: Literal["right", "left", "drop"] = "right"

    def __post_init__(self) -> None:
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError("model: its tokenizer is not a fast one (tokenizer.json), which masks need: convert it")
        if self.tokenizer.eos_token_id is None:
            raise DataError("model: its tokenizer has no eos_token, so replies could not end: set it and save it again")
        if self.chat_template and not self.tokenizer.chat_template:
            raise DataError(
                "dataset.chat_template is true, but the model's tokenizer has no chat template: set it to false "
                "(conversations are then plain text) or use a chat model"
            )

    def __call__(self, example: Example, masking: str) -> Document:
        """``masking``: ``assistant``, ``last`` or ``all``. A plain text counts as a whole. Raises DataError."""
        tokens, mask = self._encode(example, "all" if example.text is not None else masking)
        return self._fit(np.array(tokens, np.int32), np.array(mask, bool))

    def _encode(self, example: Example, masking: str) -> tuple[list[int], list[bool]]:
        if example.text is not None:
            tokens = self._ids(example.text, special=True)
            return self._closed(tokens, [True] * len(tokens))
        tokens, runs = self._chat(example, masking) if self._uses_template else self._plain(example)
        mask = [masking == "all"] * len(tokens)
        for start, end in runs[-1:] if masking == "last" else runs:
            mask[start:end] = [True] * (end - start)
        ends = example.messages[-1]["role"] == "assistant"
        return self._closed(tokens, mask) if ends else (tokens, mask)

    def _plain(self, example: Example) -> tuple[list[int], list[Run]]:
        """The contents put together as they are: what is between replies is one text."""
        tokens: list[int] = []
        runs = []
        for role, group in groupby(example.messages, key=lambda message: message["role"] == "assistant"):
            for text in self._texts(list(group), joined=not role):
                start = len(tokens)
                tokens += self._ids(text) + [self.tokenizer.eos_token_id] * role
                runs += [(start, len(tokens))] * role
        return tokens, runs

    def _texts(self, messages: list[dict[str, Any]], joined: bool) -> list[str]:
        if any(message.get("tool_calls") or message.get("reasoning_content") for message in messages):
            raise DataError(
                "dataset: a conversation has tool_calls or reasoning_content, which only a chat template can write: "
                "use a model with one, or set dataset.chat_template to true"
            )
        texts = [message["content"] for message in messages]
        return ["".join(texts)] if joined else texts

    def _chat(self, example: Example, masking: str) -> tuple[list[int], list[Run]]:
        if masking == "all":
            text = self._apply(example, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]), []
        return self._by_template(example) if _MARKED.search(self._template) else self._by_spans(example)

    def _by_template(self, example: Example) -> tuple[list[int], list[Run]]:
        """The replies as ``{% generation %}`` marks them."""
        found = self._apply(example, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        edges = np.flatnonzero(np.diff([0, *found["assistant_masks"], 0])).tolist()
        return list(found["input_ids"]), list(zip(edges[::2], edges[1::2], strict=True))

    def _by_spans(self, example: Example) -> tuple[list[int], list[Run]]:
        render = lambda messages: self._apply(Example(messages, example.tools), tokenize=False)
        text, spans = reply_spans(render, lambda: self._opening, example.messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens, places = encoded["input_ids"], np.array(encoded["offset_mapping"]).reshape(-1, 2)
        return tokens, [self._run(tokens, places, span) for span in spans]

    def _run(self, tokens: list[int], places: np.ndarray, span: tuple[int, int]) -> tuple[int, int]:
        """The tokens of a span of characters and the one that ends the turn: the special token behind them, from which
        no more than a space may part it. Both lists run along the tokens."""
        start = int(np.searchsorted(places[:, 1], span[0], side="right"))
        end = int(np.searchsorted(places[:, 0], span[1], side="left"))
        for closing in range(end, min(end + 2, len(tokens))):
            if tokens[closing] in self._special:
                return start, closing + 1
            if self.tokenizer.decode(tokens[closing]).strip():
                break
        return start, end

    def _closed(self, tokens: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        """With an end-of-text token that counts: one of the last two tokens, or one put behind them."""
        eos = self.tokenizer.eos_token_id
        if eos not in tokens[-2:]:
            return [*tokens, eos], [*mask, True]
        mask[-2 + tokens[-2:].index(eos) if len(tokens) > 1 else -1] = True
        return tokens, mask

    def _fit(self, tokens: np.ndarray, mask: np.ndarray) -> Document:
        fate: Fate = "whole"
        if len(tokens) > self.longest:
            if self.truncation == "drop":
                return _left_out("too_long")
            tokens, mask = self._cut_left(tokens, mask) if self.truncation == "left" else self._cut_right(tokens, mask)
            fate = "truncated"
        mask[:1] = False
        return Document(tokens, mask, fate) if mask.any() else _left_out("no_target")

    def _cut_right(self, tokens: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = tokens[: self.longest].copy(), mask[: self.longest].copy()
        tokens[-1], mask[-1] = self.tokenizer.eos_token_id, False
        return tokens, mask

    def _cut_left(self, tokens: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first = tokens[0]
        tokens, mask = tokens[-self.longest :].copy(), mask[-self.longest :].copy()
        if first == self.tokenizer.bos_token_id:
            tokens[0] = first
        return tokens, mask

    def _apply(self, example: Example, **options: Any) -> Any:
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(example.messages, tools=example.tools, **options)
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: a filter met a value it does not know
            roles = ", ".join(message["role"] for message in example.messages)
            raise DataError(
                f"dataset: the model's chat template refuses a conversation (roles: {roles}): {error}. Remove such "
                "rows or dataset.system_prompt, or set dataset.chat_template=false"
            ) from error

    def _ids(self, text: str, special: bool = False) -> list[int]:
        if self._one_token_a_character:
            from forge_core.models.scratch import check_encodable

            check_encodable(self.tokenizer, text, "dataset:")
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    @cached_property
    def _one_token_a_character(self) -> bool:
        """Whether the tokenizer has no token for characters outside its vocabulary."""
        return type(self.tokenizer.backend_tokenizer.model).__name__ == "WordLevel"

    @property
    def _uses_template(self) -> bool:
        return bool(self.tokenizer.chat_template) and self.chat_template is not False

    @property
    def _template(self) -> str:
        return self.tokenizer.get_chat_template()

    @cached_property
    def _special(self) -> frozenset[int]:
        """Ids of control tokens. Tokens such as <think>, which a reply holds, are added without being special."""
        added = self.tokenizer.added_tokens_decoder
        return frozenset({i for i, token in added.items() if token.special} | set(self.tokenizer.all_special_ids))

    @cached_property
    def _opening(self) -> str:
        """What the template adds to ask for a reply."""
        question = Example([{"role": "user", "content": "?"}])
        asked = self._apply(question, tokenize=False)
        asking = self._apply(question, tokenize=False, add_generation_prompt=True)
        return asking[len(asked) :] if asking.startswith(asked) else ""


def _left_out(fate: Fate) -> Document:
    return Document(np.zeros(0, np.int32), np.zeros(0, bool), fate)

"""A conversation with the embedded engine: turn after turn, in the model's chat template, each word as it comes.

Invariants:
- What the model is shown is its chat template of all turns so far. A model without one continues each text by itself.
- A conversation that gets too long for the model loses its oldest turns, never its system message. A quarter of the
  model's length is kept for the answer, or ``max_new_tokens`` where that is less.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import jinja2
from tokenizers.decoders import DecodeStream

from forge_core.data_model import GenerationRequest, SamplingParams
from forge_core.generation.hf import HFGenerator
from forge_core.models.errors import ModelError
from forge_core.models.scratch import check_encodable
from forge_core.stop import Stopped, StopToken


class Conversation:
    """``temperature`` 0 is greedy; ``max_new_tokens`` of an answer. Raises ModelError for a ``system`` message that the
    model cannot be given."""

    def __init__(
        self, engine: HFGenerator, *, temperature: float, max_new_tokens: int, system: str | None = None
    ) -> None:
        self._engine, self._temperature, self._max_new_tokens = engine, temperature, max_new_tokens
        self._turns: list[dict[str, str]] = []
        self._system = [{"role": "system", "content": system}] if system else []
        if system and not self.has_template:
            raise ModelError("--system: the model's tokenizer has no chat template to put it into: leave it out")
        if system:
            check_encodable(engine.tokenizer, system, "--system")
            self._encode([{"role": "user", "content": ""}])  # some templates know no system role

    @property
    def has_template(self) -> bool:
        return bool(getattr(self._engine.tokenizer, "chat_template", None))

    def answer(self, text: str, write: Callable[[str], None], stop: StopToken) -> str:
        """The model's answer to ``text``, which ``write`` gets piece by piece. Once ``stop`` is set, or the caller is
        interrupted, the answer is what has come. Raises ModelError for a text that the model cannot be given."""
        self._turns.append({"role": "user", "content": text})
        try:
            prompt, room = self._fitted()
        except ModelError:
            self._turns.pop()
            raise
        sampling = SamplingParams(temperature=self._temperature, max_new_tokens=min(room, self._max_new_tokens))
        pieces = _Pieces(self._engine.tokenizer, write)
        try:
            request = GenerationRequest("chat", tuple(prompt), secrets.randbits(32), sampling)
            rest = self._engine.stream(request, pieces.token, stop=stop).text.removeprefix(pieces.text)
            pieces.add(rest)  # a character whose bytes did not all come
        except Stopped:
            pass
        finally:
            self._turns.append({"role": "assistant", "content": pieces.text})
        return pieces.text

    def _fitted(self) -> tuple[list[int], int]:
        """Token ids of the conversation, and how many more fit; the oldest turns are left out as need be."""
        if not self.has_template:
            del self._turns[:-1]
        while True:
            ids = self._encode(self._turns)
            room = self._engine.max_positions - len(ids)
            if room >= min(self._max_new_tokens, self._engine.max_positions // 4) or len(self._turns) == 1:
                break
            del self._turns[:2]
        if room < 1:
            raise ModelError(f"this is {len(ids)} tokens long; the model takes {self._engine.max_positions}")
        return ids, room

    def _encode(self, turns: list[dict[str, str]]) -> list[int]:
        tokenizer: Any = self._engine.tokenizer
        check_encodable(tokenizer, turns[-1]["content"], "this text")
        if not self.has_template:
            return list(tokenizer.encode(turns[-1]["content"], add_special_tokens=False))
        try:
            return list(
                tokenizer.apply_chat_template([*self._system, *turns], add_generation_prompt=True, return_dict=False)
            )
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template refuses the conversation: {error}") from error


class _Pieces:
    """Text from tokens: a character is written when all of its bytes are there."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.text = ""
        self._backend, self._write = tokenizer.backend_tokenizer, write
        self._decoder = DecodeStream(skip_special_tokens=True)

    def token(self, token: int) -> None:
        if (piece := self._decoder.step(self._backend, token)) is not None:
            self.add(piece)

    def add(self, piece: str) -> None:
        self.text += piece
        if piece:
            self._write(piece)

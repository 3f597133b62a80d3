"""The completion is in the right language."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

# What looks the same in every language, or like English in any: code, formulas, tags, addresses, numbers.
_NOT_LANGUAGE = re.compile(
    r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\[(?:(?!\\\[).)*?\\\]|\\\((?:(?!\\\().)*?\\\)|\\boxed\{[^{}]*\}|<[^<>\n]*>"
    r"|https?://\S+|[\d_]+",
    re.DOTALL,
)


class LanguageReward:
    """1 when the completion is in ``language`` (ISO 639-1 code; None: the language of the prompt), else 0; with
    ``probability`` the identifier's probability of it.

    Code, formulas, tags, addresses and numbers are left aside. A completion without a word is 0: no language. Short
    texts are told apart badly: ``among`` limits the languages that are considered. The identifier is py3langid.
    """

    needs_answer = False

    def __init__(self, language: str | None = "en", among: Sequence[str] | None = None, probability: bool = False):
        self.language, self.probability = language, probability
        self._identifier = _identifier(None if among is None else tuple(among))
        known = set(self._identifier.nb_classes)
        if language is not None and language not in known:
            raise ValueError(f"language {language!r} is not among {', '.join(sorted(known))}")

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        text = words_of(completion)
        if not text:
            return 0.0
        ranked = dict(self._identifier.rank(text))
        wanted = self.language or self._identifier.classify(words_of(prompt))[0]
        return ranked[wanted] if self.probability else float(max(ranked, key=ranked.__getitem__) == wanted)


@lru_cache(maxsize=8)  # a third of a second, and a command makes each reward more than once
def _identifier(among: tuple[str, ...] | None) -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(among)
    return identifier


def words_of(text: str) -> str:
    """``text`` without what tells nothing of its language."""
    rest = _NOT_LANGUAGE.sub(" ", text)
    return " ".join(rest.split()) if any(c.isalpha() for c in rest) else ""

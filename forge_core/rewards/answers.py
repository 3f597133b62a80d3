"""The answer to compare with, and the normal form of a short text."""

from __future__ import annotations

import re
import string
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_of(metadata: dict[str, Any]) -> str:
    """``metadata["answer"]`` as text. Raises KeyError when there is none: such a prompt cannot be graded."""
    if metadata.get("answer") is None:
        raise KeyError("the prompt has no answer to compare with: set dataset.answer_column")
    return str(metadata["answer"])


def normal_form(text: str) -> str:
    """``text`` without case, punctuation, English articles and repeated white space (as SQuAD's evaluation does)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())

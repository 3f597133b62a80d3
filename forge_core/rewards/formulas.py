"""Formulas in a text: ``$…$``, ``$$…$$``, ``\\(…\\)`` and ``\\[…\\]``.

A dollar sign that is money begins no formula (``$18 a day and $126 a week`` has none): one that closes has no space
before it and no digit after it, unless spaces stand inside of both. The time grows with the text and no faster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_MARK = re.compile(r"(?<!\\)(?:\$\$?|\\[()\[\]])")
_CLOSING = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def formulas(text: str) -> Iterator[tuple[int, str]]:
    """Each formula: where its mark begins, and what it holds."""
    marks = list(_MARK.finditer(text))
    last = {mark[0]: mark.start() for mark in marks}
    opening: re.Match[str] | None = None
    for mark in marks:
        if opening is not None and mark[0] == _CLOSING[opening[0]]:
            content = text[opening.end() : mark.start()]
            if mark[0] != "$" or _is_formula(content, text[mark.end() : mark.end() + 1]):
                yield opening.start(), content.strip()
                opening = None
                continue
        elif opening is not None and opening[0] != "$":
            continue  # a sign inside of the formula
        opening = mark if last.get(_CLOSING.get(mark[0], ""), -1) > mark.start() else None


def _is_formula(content: str, after: str) -> bool:
    if not content.strip() or "\n" in content or after.isdigit():
        return False
    if content[0].isspace() or content[-1].isspace():
        return content[0].isspace() and content[-1].isspace() and not _WORD.search(content)
    return True

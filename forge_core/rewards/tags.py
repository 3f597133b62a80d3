"""Blocks between an opening and a closing mark, found in time that grows with the text and no faster: a model that
writes one mark ten thousand times costs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

ANSWER = re.compile(r"<(/?)answer>", re.IGNORECASE)


def blocks(text: str, mark: re.Pattern[str]) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
    """The marks around each block: an opening one and the first closing one after it. ``mark``: its first group is
    empty in an opening mark."""
    opening = None
    for found in mark.finditer(text):
        if not found[1]:
            opening = opening or found
        elif opening is not None:
            yield opening, found
            opening = None


def contents(text: str, mark: re.Pattern[str]) -> list[str]:
    """What the blocks hold."""
    return [text[opening.end() : closing.start()] for opening, closing in blocks(text, mark)]


def without_blocks(text: str, mark: re.Pattern[str]) -> str:
    """``text`` with a space in the place of each block."""
    kept, position = [], 0
    for opening, closing in blocks(text, mark):
        kept.append(text[position : opening.start()])
        position = closing.end()
    return " ".join([*kept, text[position:]])

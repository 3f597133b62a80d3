"""Where the answer stands in a response: ``<answer>`` tags, ``\\boxed{}``, or no mark at all.

Guarantees:
- What is thought before the last ``</think>`` holds no answer.
- A box that is not closed is no box; braces in a box are balanced; a box in a box (or in a tag) is the inner one.
- Boxes with nothing between them but ``and``, ``or``, commas and white space are one answer, a list.
"""

from __future__ import annotations

import re
from typing import Literal

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_BETWEEN_BOXES = re.compile(r"(\s|,|;|\$|\\\(|\\\)|\\text\{\s*(and|or)\s*\}|\band\b|\bor\b)*")

Place = Literal["any", "answer_tag", "boxed"]


def marked_answer(text: str, place: Place, take: Literal["last", "first"]) -> str | None:
    """The last or first tagged or boxed answer of ``text``, without its mark; None when there is none.

    ``place`` ``any``: a tag, else a box.
    """
    visible = after_thinking(text)
    found = _TAG.findall(visible) if place != "boxed" else []
    if not found and place != "answer_tag":
        found = boxed(visible)
    if not found:
        return None
    chosen = found[-1 if take == "last" else 0]
    inner = boxed(chosen)
    return (inner[-1] if inner else chosen).strip()


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; all of ``text`` when there is none."""
    return re.split(r"</\s*think\s*>", text, flags=re.IGNORECASE)[-1]


def outside_tags(text: str) -> str:
    """``text`` without its ``<answer>`` blocks."""
    return _TAG.sub(" ", text)


def has_box(text: str) -> bool:
    """Whether a box begins in ``text``, closed or not."""
    return _BOX.search(text) is not None


def boxed(text: str) -> list[str]:
    """The contents of the closed boxes of ``text`` (``\\boxed``, ``\\fbox``), in order; neighbours are one list."""
    found: list[str] = []
    end, position = -1, 0
    while match := _BOX.search(text, position):
        content, after = _content(text, match.end())
        if content is None:
            position = match.end()
            continue
        inner = boxed(content)
        content = inner[-1] if inner else content
        if found and _BETWEEN_BOXES.fullmatch(text, end, match.start()):
            found[-1] = f"{found[-1]}, {content}"
        else:
            found.append(content)
        end = position = after
    return found


def _content(text: str, start: int) -> tuple[str | None, int]:
    """What the box whose name ends at ``start`` holds, and where it ends. Without a brace: the next sign or number."""
    if not text.startswith("{", start):
        bare = re.compile(r"\d+(\.\d+)?|[A-Za-z]").match(text, start)
        return (bare[0], bare.end()) if bare else (None, start)
    depth = 0
    for position in range(start, len(text)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[start + 1 : position], position + 1
    return None, start

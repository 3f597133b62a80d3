"""Where the answer stands in a response: ``<answer>`` tags, ``\\boxed{}``, or no mark at all.

Guarantees:
- What is thought before the last ``</think>`` holds no answer.
- A box that is not closed is no box; braces in a box are balanced; a box in a box (or in a tag) is the inner one.
- The time grows with the text and no faster, whatever a model repeats.
- Boxes with nothing between them but ``and``, ``or``, commas and white space are one answer, a list.
"""

from __future__ import annotations

import re
from typing import Literal

from forge_core.rewards.tags import ANSWER, contents, without_blocks

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")  # the name of a command ends where its letters do: \boxed5
_BARE = re.compile(r"\d+(\.\d+)?|[A-Za-z]")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # what follows a backslash is no brace of ours
_DEEPEST = 8  # boxes in boxes
_BETWEEN_BOXES = re.compile(r"(\s|,|;|\$|\\\(|\\\)|\\text\{\s*(and|or)\s*\}|\band\b|\bor\b)*")

Place = Literal["any", "answer_tag", "boxed"]


def marked_answer(text: str, place: Place, take: Literal["last", "first"]) -> str | None:
    """The last or first tagged or boxed answer of ``text``, without its mark; None when there is none.

    ``place`` ``any``: a tag, else a box.
    """
    visible = after_thinking(text)
    found = contents(visible, ANSWER) if place != "boxed" else []
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
    return without_blocks(text, ANSWER)


def has_box(text: str) -> bool:
    """Whether a box begins in ``text``, closed or not."""
    return _BOX.search(text) is not None


def boxed(text: str, depth: int = _DEEPEST) -> list[str]:
    """The contents of the closed boxes of ``text`` (``\\boxed``, ``\\fbox``), in order; neighbours are one list."""
    closing = _closing_braces(text)
    found: list[str] = []
    end, position = -1, 0
    while match := _BOX.search(text, position):
        content, after = _content(text, match.end(), closing)
        if content is None:
            position = match.end()
            continue
        inner = boxed(content, depth - 1) if depth else []
        content = inner[-1] if inner else content
        if found and _BETWEEN_BOXES.fullmatch(text, end, match.start()):
            found[-1] = f"{found[-1]}, {content}"
        else:
            found.append(content)
        end = position = after
    return found


def _closing_braces(text: str) -> dict[int, int]:
    """Where each brace that is closed is closed."""
    opened: list[int] = []
    closing = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def _content(text: str, start: int, closing: dict[int, int]) -> tuple[str | None, int]:
    """What the box whose name ends at ``start`` holds, and where it ends. Without a brace: the next sign or number."""
    if not text.startswith("{", start):
        bare = _BARE.match(text, start)
        return (bare[0], bare.end()) if bare else (None, start)
    if start not in closing:
        return None, start
    return text[start + 1 : closing[start]], closing[start] + 1

"""Which characters of a rendered conversation the assistant writes, whatever the chat template does to its messages.

Templates strip the thinking of earlier replies, trim white space and write tool calls in forms of their own, so a
reply can neither be searched for in the rendered text nor measured by rendering the conversation piece by piece.

Method: render the conversation again with one reply replaced by a mark that occurs nowhere. What the two renderings
have in common before and after it is not that reply; what differs is. A reply begins where generation would begin:
behind the text that the template adds to ask for a reply, where that lies just before.

Guarantees: the rendering of the messages as they are is what is trained on; spans are in order and do not overlap; a
template that resists the method is a DataError, never a wrong mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forge_core.data.errors import DataError

Render = Callable[[list[dict[str, Any]]], str]
_PRIVATE = range(0xE000, 0xF8FF)  # characters without a meaning of their own


def reply_spans(
    render: Render, opening_of: Callable[[], str], messages: Sequence[dict[str, Any]]
) -> tuple[str, list[tuple[int, int]]]:
    """The rendered text, and ``(start, end)`` of every reply in it. A reply that the template leaves out has none.

    ``opening_of``: gives what the template adds to ask for a reply. Raises DataError.
    """
    text = render(list(messages))
    opening = opening_of()
    mark = next(chr(code) for code in _PRIVATE if chr(code) not in text)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        marked = render([*messages[:index], {"role": "assistant", "content": mark}, *messages[index + 1 :]])
        if mark not in marked:
            continue
        start, end = _difference(text, marked)
        before = spans[-1][1] if spans else 0
        begins = text.rfind(opening, before, start) if opening else -1
        start = start if begins < 0 else begins + len(opening)
        if marked.count(mark) > 1 or not before <= start <= end:
            raise DataError(
                f"dataset: the model's chat template writes message {index} where its tokens cannot be told from "
                "those of others: mark replies in the template with {% generation %}, or set masking=all"
            )
        spans.append((start, end))
    return text, spans


def _difference(text: str, marked: str) -> tuple[int, int]:
    """Start and end of the part of ``text`` that ``marked`` does not share. The mark stops both searches."""
    start = _common(text, marked)
    tail = _common(text[start:][::-1], marked[start:][::-1])
    return start, len(text) - tail


def _common(one: str, other: str) -> int:
    """Length of the common beginning, found by halving: comparing slices is much faster than comparing characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low

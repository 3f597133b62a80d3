"""Which characters of a rendered conversation the assistant writes, whatever the chat template does to its messages.

Templates strip the thinking of earlier replies, trim white space and write tool calls in forms of their own, so a
reply can neither be searched for in the rendered text nor measured by rendering the conversation piece by piece.

Method: render the conversation again with one reply replaced by a mark that occurs nowhere. What the two renderings
have in common before and after it is not that reply; what differs is. A reply begins where generation would begin:
behind the text that the template adds to ask for a reply, where that stands between the message before and the reply.
What the template itself writes between the two differs only where it treats the reply specially.

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
    marks = [chr(code) for code in _PRIVATE if chr(code) not in text]
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        marked = render(_with_mark(messages, index, marks[0]))
        if marks[0] not in marked:
            continue
        start, end = _difference(text, marked)
        before = spans[-1][1] if spans else 0
        begins = _opening_at(render, messages, index, marks, marked, opening, start)
        start, found = (start, False) if begins < before else (begins + len(opening), True)
        told_apart = found or _begins_at(marked, marks[0], start, message)
        if marked.count(marks[0]) > 1 or not before <= start <= end or not told_apart:
            raise DataError(
                f"dataset: the model's chat template writes message {index} where its tokens cannot be told from "
                "those of others: mark replies in the template with {% generation %}, or set masking=all"
            )
        spans.append((start, end))
    return text, spans


def _with_mark(messages: Sequence[dict[str, Any]], index: int, mark: str) -> list[dict[str, Any]]:
    """The messages, number ``index`` of them a reply of nothing but ``mark``."""
    return [*messages[:index], {"role": "assistant", "content": mark}, *messages[index + 1 :]]


def _opening_at(
    render: Render,
    messages: Sequence[dict[str, Any]],
    index: int,
    marks: Sequence[str],
    marked: str,
    opening: str,
    start: int,
) -> int:
    """Where the last ``opening`` up to ``start`` is, unless the message before has written it; else -1."""
    begins = marked.rfind(opening, 0, start) if opening else -1
    if begins < 0 or begins + len(opening) == start or index == 0:
        return begins
    previous = messages[index - 1]
    longer = {**previous, "content": f"{previous.get('content') or ''}{marks[1]}"}
    both = render(_with_mark([*messages[: index - 1], longer, *messages[index:]], index, marks[0]))
    ends, reply = both.rfind(marks[1]), both.find(marks[0])
    distance = marked.find(marks[0]) - begins
    return begins if ends < 0 or distance < reply - ends else -1


def _begins_at(marked: str, mark: str, start: int, message: dict[str, Any]) -> bool:
    """Whether the renderings part where the reply begins: what a template wrote before it would count otherwise. (Calls
    of tools may stand where content would have a space before it.)"""
    between = marked[start : marked.find(mark)]
    return not between or (not between.strip() and not message.get("content"))


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

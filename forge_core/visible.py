"""Text of others on a terminal or a page: control characters are shown, not obeyed."""

from __future__ import annotations

_NAMES = {
    **{i: chr(0x2400 + i) for i in range(32) if i not in (9, 10)},  # their own pictures; tabs and lines stay
    127: "␡",
    **dict.fromkeys(range(128, 160), "\ufffd"),
}


def visible(text: str) -> str:
    return text.translate(_NAMES)

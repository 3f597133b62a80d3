"""One line of what ``forge doctor`` reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """``remedy`` is empty when ``ok``."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    essential: bool = False

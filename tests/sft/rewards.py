"""A reward that says nothing."""

from __future__ import annotations


def nothing(prompt: str, completion: str, metadata: dict) -> float:
    return 0.0

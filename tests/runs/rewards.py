"""Rewards of the tiny run: smooth enough that an untrained model gets different rewards within a group."""

from typing import Any


def first_digit(prompt: str, completion: str, metadata: dict[str, Any]) -> float:
    """Share of the first three characters that are low digits."""
    return sum(c in "01234" for c in completion[:3]) / 3


def constant(prompt: str, completion: str, metadata: dict[str, Any]) -> float:
    return 0.7


def broken(prompt: str, completion: str, metadata: dict[str, Any]) -> float:
    raise RuntimeError("the verifier is down")


def sparse(prompt: str, completion: str, metadata: dict[str, Any]) -> float:
    """1 for completions that begin with a 7: about one in twenty of an untrained model's."""
    return float(completion.startswith("7"))

"""Other rewards than those of the tiny runs."""

from typing import Any


def high_digits(prompt: str, completion: str, metadata: dict[str, Any]) -> float:
    """Share of the first three characters that are high digits."""
    return sum(c in "56789" for c in completion[:3]) / 3

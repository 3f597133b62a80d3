"""What travels inside of a message, pickled by itself: cargo that one side cannot read costs one call, not the actor.

Both sides are this project's own processes, so pickle is safe.
"""

from __future__ import annotations

import pickle
from typing import Any


def dump(value: Any) -> bytes:
    """Raises whatever pickling ``value`` raises."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def load(cargo: bytes) -> Any:
    """Raises whatever reading it raises, such as AttributeError for a class that only the other side has."""
    return pickle.loads(cargo)

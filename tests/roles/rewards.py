"""A reward that gets stuck."""

import os
import time
from pathlib import Path
from typing import Any

MARKER = "STUCK_ONCE_MARKER"  # names a file in the environment of the workers


def stuck_once(prompt: str, completion: str, metadata: dict[str, Any]) -> float:
    """Share of digits; the process that grades first never comes back."""
    try:
        Path(os.environ[MARKER]).touch(exist_ok=False)
    except FileExistsError:
        return sum(c.isdigit() for c in completion) / max(len(completion), 1)
    time.sleep(3600)
    return 0.0

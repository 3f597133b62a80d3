"""Garbage collection in a process that imports large libraries.

Importing torch, transformers and Prefect makes a million objects, which all stay. By default the collector goes through
them again and again meanwhile, and once more when the interpreter ends: three of eight seconds.
"""

from __future__ import annotations

import atexit
import gc

NEW_OBJECTS = 10_000  # after so many the collector looks at them (Python: 700, or 2,000)


def collect_seldom() -> None:
    """For the rest of this process. Idempotent."""
    if gc.get_threshold()[0] != NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, 10, 10)
        atexit.register(gc.freeze)  # what ends with the process need not be freed one by one

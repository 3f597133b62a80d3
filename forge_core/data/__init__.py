"""Prompts: where they come from, which are held out, and the order in which a run visits them.

Names are imported when they are used: ``forge_core.data.importing``, with which every grading process starts, needs
nothing but the standard library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_core.data.cursor import Cursor, next_rows
    from forge_core.data.errors import DataError
    from forge_core.data.prompts import Prompt, PromptSet, check_dataset, load_prompts, render, split_holdout

__all__ = [
    "Cursor",
    "DataError",
    "Prompt",
    "PromptSet",
    "check_dataset",
    "load_prompts",
    "next_rows",
    "render",
    "split_holdout",
]
_HOMES = {"Cursor": "cursor", "next_rows": "cursor", "DataError": "errors"}  # the others are in prompts


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'prompts')}"), name)

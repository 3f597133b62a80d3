"""Prompts: where they come from, which are held out, and the order in which a run visits them."""

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

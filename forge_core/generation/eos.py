"""The tokens that end a response."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_core.models.resolve import read_json


def eos_token_ids(folder: Path, configured: int | list[int] | None, tokenizer: Any) -> list[int]:
    """Those of ``generation_config.json`` (else ``configured``, the model configuration's) and the tokenizer's."""
    path = folder / "generation_config.json"
    named = read_json(path).get("eos_token_id") if path.exists() else configured
    listed = named if isinstance(named, list) else [named]
    return sorted({i for i in [*listed, tokenizer.eos_token_id] if i is not None})

"""Loaders of small sets that mix questions and texts, and what their rows hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_core.data.loader import PackedRow, build_loader
from forge_core.data.sft_settings import SftDataConfig
from tests.data.tokenizers import CHATML, tokenizer


def section(files: Path, *, streaming: bool = False, **fields: Any) -> SftDataConfig:
    """A mixture within a mixture."""
    texts = {"path": str(files / "part*.parquet"), "streaming": streaming, "label": "texts", "weight": 3}
    inner = {"label": "inner", "mixture": [{"path": str(files / "short.jsonl"), "streaming": streaming}, texts]}
    outer = [{"path": str(files / "long.jsonl"), "weight": 0.5}, inner]
    return SftDataConfig(mixture=outer, **{"packing_window": 3, "shuffle_buffer": 7, **fields})


def loader(section: SftDataConfig, seed: int = 0, seq_len: int = 64) -> Any:
    return build_loader(section, tokenizer(CHATML), seq_len, seed=seed)


def text(row: PackedRow) -> bytes:
    return b"".join(array.tobytes() for array in vars(row).values())


def documents(rows: list[PackedRow]) -> list[str]:
    found = []
    for row in rows:
        for i in range(row.document_ids.max() + 1):
            own = row.document_ids == i
            found.append(tokenizer().decode([*row.input_ids[own], row.target_ids[own][-1]]))
    return found

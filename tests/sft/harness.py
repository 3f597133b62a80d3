"""A small real supervised run, driven step by step without Prefect: real trainer, loader and store, seconds each."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from forge_core.config.sft_config import SftConfig
from forge_core.config.sft_loader import load_sft_config
from forge_core.runs.initialise import initialise
from forge_core.runs.record import create_run, load_run
from forge_core.runs.sft import train_rows
from forge_core.runs.sft_context import SftContext
from forge_core.store import Store, open_store
from tests.runs.harness import OPENED, decided, memory, opened
from tests.runs.harness import TINY as GRPO

__all__ = ["OPENED", "TINY", "advance", "decided", "memory", "new_run", "opened", "reopened", "tiny", "write_data"]

TINY: dict[str, Any] = {
    "run": {"id": "tiny-sft", "seed": 3},
    "steps": 4,
    "model": {**GRPO["model"], "max_position_embeddings": 48},
    "dataset": {"format": "prompt_completion", "holdout": 0.1, "packing_window": 4},
    "training": {"batch_size": 4, "sync_interval": 2, "seq_len": 48, "token_budget": 96, "learning_rate": 1e-2},
    "validation": {"rows": 4},
    "checkpoint": {"interval": 2},
}


def write_data(file: Path, count: int = 300, seed: int = 1) -> Path:
    """Demonstrations of sorting digits, of several lengths."""
    draw = random.Random(seed)
    with file.open("w") as out:
        for _ in range(count):
            digits = [draw.choice("0123456789") for _ in range(draw.randint(3, 9))]
            row = {"prompt": f"s:{''.join(digits)}=", "completion": "".join(sorted(digits))}
            out.write(json.dumps(row) + "\n")
    return file


def tiny(data: Path, *overrides: str) -> SftConfig:
    return load_sft_config(TINY, [f"dataset.path={data}", "training.threads=1", *overrides])


def new_run(store: Store | str, data: Path, *overrides: str) -> SftContext:
    store = open_store(store) if isinstance(store, str) else store
    return opened(SftContext(store, create_run(store, tiny(data, *overrides))))


def reopened(ctx: SftContext) -> SftContext:
    """The same run as another process would open it."""
    return opened(SftContext(ctx.store, load_run(ctx.store, ctx.run_id)))


def advance(ctx: SftContext, until: int) -> SftContext:
    """Take training steps up to version ``until``."""
    initialise(ctx)
    for batch in range(max(0, ctx.ledger.head()), until):
        train_rows(ctx, batch)
    return ctx

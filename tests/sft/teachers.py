"""A teacher for the tiny run: a model of its architecture with other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_core.config.data_sections import ScratchModel
from forge_core.models.scratch import create
from tests.runs.harness import TINY


def teacher(folder: Path, **changes: Any) -> Path:
    model = ScratchModel.model_validate({**TINY["model"], "initializer_range": 0.3, **changes})
    create(model, 9, folder / "teacher")
    return folder / "teacher"

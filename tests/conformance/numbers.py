"""The numbers of vector files: strict JSON, so what is not finite is text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tensor(values: Any) -> Tensor:
    """Nested lists (with ``"nan"``, ``"inf"``, ``"-inf"``) as float64."""
    return torch.tensor(_numbers(values), dtype=torch.float64)


def number(value: Tensor) -> float:
    return float(value.detach())


def _numbers(values: Any) -> Any:
    return [_numbers(v) for v in values] if isinstance(values, list) else float(values)

"""A reward that records what it sees; it is no built-in one, so it works in a grading process."""

from __future__ import annotations

from typing import Any

from forge_core.observability.metrics import record_metric
from forge_core.observability.reductions import Reduce
from tests.runs.rewards import first_digit


def counted(prompt: str, completion: str, metadata: dict[str, Any]) -> float:
    reward = float(first_digit(prompt, completion, metadata))
    record_metric("own/graded", 1, Reduce.SUM)
    record_metric("own/samples", {"text": completion, "reward": reward}, Reduce.SAMPLE)
    return reward

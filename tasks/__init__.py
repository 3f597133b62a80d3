"""The Prefect tasks of a run, one a file: find the run, call forge_core, return a reference.

Invariants: tasks take and return small references, never arrays; Prefect persists no result; retries cover I/O errors
only; a failed task fails with its own error.
"""

from dataclasses import dataclass
from typing import Any

from tasks.evaluate import evaluate
from tasks.initialise import initialise
from tasks.reference import reference_logprobs
from tasks.refill import refill
from tasks.rollout import rollout
from tasks.score import score
from tasks.train import train


@dataclass(frozen=True)
class Stages:
    """The tasks that the GRPO loop submits. Anything with ``submit(*args, wait_for=…)`` can stand in for one."""

    rollout: Any = rollout
    score: Any = score
    refill: Any = refill
    reference: Any = reference_logprobs
    evaluate: Any = evaluate
    train: Any = train


STAGES = Stages()

__all__ = ["STAGES", "Stages", "evaluate", "initialise", "reference_logprobs", "refill", "rollout", "score", "train"]

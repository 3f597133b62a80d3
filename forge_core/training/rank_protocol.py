"""What the owner of a group of ranks and its leading rank say to each other (pickles over a private Unix socket).

The owner sends a ``Command`` and gets one ``Answer`` or ``Failed`` back; in between it may send a ``StopCommand``. The
first message is the leading rank's ``Ready``. A closed socket means that the other side is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_core.observability.metrics import Metric

if TYPE_CHECKING:
    from forge_core.training.stored import TrainerSpec

SOCKET = "FORGE_RANKS_SOCKET"  # environment variable: path of the owner's socket
STOPPABLE = frozenset({"train_samples", "logprobs_samples"})  # methods that take a stop token
SHARED_OUT = frozenset(
    {"state_digest", "upload_adapter", "upload_checkpoint", "upload_weights"}
)  # each rank has a result of its own


@dataclass(frozen=True)
class Command:
    """Every rank calls ``method`` of its trainer, with its loss in ``loss_state``; ``spec``: make a trainer first."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    loss_state: dict[str, Any] | None = None
    spec: TrainerSpec | None = None


@dataclass(frozen=True)
class StopCommand:
    """The command ``number`` shall end at the next micro-batch."""

    number: int
    reason: str


@dataclass(frozen=True)
class Ready:
    """All ranks have met. ``pids``: process of each rank on the owner's host; ``ranks``: how many there are in all."""

    pids: dict[int, int]
    ranks: int


@dataclass(frozen=True)
class Answer:
    """What each rank returned (None where it is the leading rank's to say), or that all stopped; ``recorded``: the
    metrics of each rank since its last answer."""

    number: int
    results: list[Any]
    stopped: bool = False
    recorded: tuple[list[Metric], ...] = ()


@dataclass(frozen=True)
class Failed:
    """``rank`` raised an error, maybe for want of memory; the group is of no use any more."""

    rank: int
    error: str
    out_of_memory: bool = False

"""How metrics of parts become metrics of the whole.

Invariant: a loss's metrics add up over micro-batches, except those whose last part starts with ``max`` (such as
``mismatch/max_abs_logprob``), of which the largest counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch


def is_maximum(name: str) -> bool:
    """Whether a metric is reduced by its maximum and not by its sum."""
    return name.rpartition("/")[2].startswith("max")


def accumulate(sums: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a micro-batch's metrics (tensors or numbers) to ``sums``, in place, without reading the device."""
    for name, value in part.items():
        value = torch.as_tensor(value).detach()
        if name not in sums:
            sums[name] = value
        else:
            sums[name] = torch.maximum(sums[name], value) if is_maximum(name) else sums[name] + value


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value for several optimizer steps: the mean of each metric over the steps that have it, the largest of a
    maximum, the learning rate of the last step."""
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: (max if is_maximum(name) else fmean)(step[name] for step in steps if name in step) for name in names}
    return found | {name: steps[-1][name] for name in names if name == "learning_rate"}

"""What ranks tell each other outside the model: metrics, log-probabilities, and that they were asked to stop.

Guarantees:
- Each function is called by all ranks of its group together, and a group of one exchanges nothing.
- The device is read once a call, however many metrics there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.algorithms.metrics import is_maximum
from forge_core.stop import Stopped, StopToken


def check_stop(stop: StopToken | None, together: bool) -> None:
    """Raise ``Stopped`` when the token is set; ``together``: on every rank of the process group when any rank's is."""
    if stop is None:
        return
    if not together or dist.get_world_size() == 1:
        stop.check()
        return
    flag = torch.tensor(int(stop.is_set()))  # on the CPU: the device goes on working
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag:
        raise Stopped(stop.reason or "another rank was stopped")


def reduced(metrics: Mapping[str, Tensor], group: dist.ProcessGroup | None, device: torch.device) -> dict[str, float]:
    """Sums of the metrics over the ranks of ``group`` (maxima: the largest), as numbers."""
    names = sorted(metrics, key=is_maximum)
    if not names:
        return {}
    values = torch.stack([metrics[name].detach().to(device, torch.float64) for name in names])
    if group is not None:
        sums = sum(not is_maximum(name) for name in names)
        dist.all_reduce(values[:sums], group=group)
        if sums < len(names):
            dist.all_reduce(values[sums:], op=dist.ReduceOp.MAX, group=group)
    return dict(zip(names, values.tolist(), strict=True))


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The value of each rank of ``group``, in order of ranks."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found

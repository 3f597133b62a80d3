"""Matrix products of the layers in float8, by torchao through torchtitan's converter (row-wise scales).

Guarantee: where it cannot be done it is refused, by key, before the model is built; it is never silently left out.
Weights, gradients and optimizer state keep their types; the output matrix and sizes that 16 does not divide stay as
they are. Rows of micro-batches have lengths that 16 divides (``TrainerSettings.row_multiple``).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

_REMEDY = "set quantize.float8=false"


def check_float8(device: torch.device) -> None:
    """Raises ValueError, naming the key, unless ``device`` and the installed packages can train in float8."""
    if device.type != "cuda":
        raise ValueError(f"quantize.float8: is true, but the trainer is on {device.type}, which has none: {_REMEDY}")
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < (8, 9):
        name, found = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise ValueError(
            f"quantize.float8: is true, but {name} has compute capability {found}; float8 needs 8.9 or more: {_REMEDY}"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(
            "quantize.float8: is true, but torchao is not installed: install the release that goes with "
            f"torch {torch.__version__} (pip install torchao), or {_REMEDY}"
        )


def with_float8(config: Any) -> Any:
    """torchtitan's model configuration with its linear layers in float8."""
    from torchtitan.components.quantization.float8 import Float8LinearConverter

    return Float8LinearConverter.Config(filter_fqns=["lm_head"]).build().convert(config)

"""What GPUs can do, by their names. Nothing here takes memory on a GPU: the driver knows the name."""

from __future__ import annotations

import re

PEAK_FLOPS = {  # dense bfloat16, a second, by what the driver calls the GPU
    "GB200": 2.5e15, "B200": 2.25e15, "B100": 1.75e15, "H200": 989e12, "H100": 989e12, "GH200": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "MI355X": 2.5e15, "MI325X": 1307e12, "MI300X": 1307e12,
}  # fmt: skip


def peak_flops(device: str) -> float | None:
    """Of one GPU, a second; None for a CPU or a GPU that is not in the table."""
    if device == "cpu":
        return None
    import torch

    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    words = re.split(r"[^A-Za-z0-9]+", name)
    if {"PCIe", "NVL"} & {*words} and "A100" not in words:  # they are slower than the table says
        return None
    return next((PEAK_FLOPS[word] for word in words if word in PEAK_FLOPS), None)

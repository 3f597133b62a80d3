"""What NVIDIA's driver says of the GPUs of this machine, hidden ones too; no GPU is used for it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import cache

WHOLE_UUID = len("GPU-00000000-0000-0000-0000-000000000000")


def ask(*fields: str) -> list[list[str]]:
    """The ``fields`` of each GPU, named as in ``nvidia-smi --help-query-gpu``; empty where there is no such driver."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no such GPU, or no such driver
        return []
    return [[field.strip() for field in line.split(",")] for line in answer.splitlines()]


def whole_uuids(ids: Sequence[str]) -> tuple[str, ...]:
    """``ids`` with UUIDs in full: CUDA takes the first characters of one (``GPU-1a2b``), vLLM and NVML do not. What the
    driver does not know stays as it is."""
    return tuple(_whole(name) if name.startswith("GPU-") and len(name) < WHOLE_UUID else name for name in ids)


def _whole(name: str) -> str:
    return next((uuid for uuid in uuids() if uuid.startswith(name)), name)


@cache
def uuids() -> tuple[str, ...]:
    """The UUID of each GPU, by index."""
    return tuple(uuid for (uuid,) in ask("uuid"))

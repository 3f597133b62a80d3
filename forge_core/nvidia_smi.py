"""What NVIDIA's driver says of the GPUs of this machine, hidden ones too; no GPU is used for it."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from functools import cache

log = logging.getLogger("forge")
ANSWER_S = 60.0  # without persistence mode the driver wakes each GPU first, which takes seconds
WHOLE_UUID = len("GPU-00000000-0000-0000-0000-000000000000")


def ask(*fields: str) -> list[list[str]]:
    """The ``fields`` of each GPU, named as in ``nvidia-smi --help-query-gpu``; empty where there is no such driver."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no such GPU, or no such driver
        return []
    except subprocess.TimeoutExpired:
        log.warning("nvidia-smi has not answered within %.0f s: the GPUs are used without what it knows", ANSWER_S)
        return []
    return [[field.strip() for field in line.split(",")] for line in answer.splitlines()]


def whole_uuids(ids: Sequence[str]) -> tuple[str, ...]:
    """``ids`` with UUIDs in full: CUDA takes the first characters of one (``GPU-1a2b``), vLLM and NVML do not. What the
    driver does not know stays as it is."""
    return tuple(_whole(name) if name.startswith("GPU-") and len(name) < WHOLE_UUID else name for name in ids)


def _whole(name: str) -> str:
    return next((uuid for uuid in uuids() if uuid.startswith(name)), name)


def uuids() -> tuple[str, ...]:
    """The UUID of each GPU, in the driver's order."""
    return tuple(uuid for uuid, _ in _cards())


def uuid_of(index: int) -> str | None:
    """The UUID of the GPU that CUDA calls ``index`` where no variable hides any; None where that is not known: of cards
    that are not alike CUDA has the fastest first, unless it is told not to."""
    cards = _cards()
    alike = len({name for _, name in cards}) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return cards[index][0] if alike and index < len(cards) else None


def _cards() -> tuple[tuple[str, str], ...]:
    try:
        return _answered()
    except LookupError:
        return ()


@cache
def _answered() -> tuple[tuple[str, str], ...]:
    """UUID and name of each GPU. Raises LookupError without an answer, which may come the next time."""
    cards = [tuple(row) for row in ask("uuid", "name") if len(row) == 2]  # it also says "No devices were found"
    if not cards:
        raise LookupError
    return tuple((uuid, name) for uuid, name in cards)

"""Small file systems, for disks that are full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """``small_disk(mebibytes)`` mounts a file system of that size until the test ends."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mounted(mebibytes: int) -> Path:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("mounting a small file system needs root and the right to mount")
        return folder

    yield mounted
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)

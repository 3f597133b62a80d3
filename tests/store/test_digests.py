"""The digest of a file is sha256 whatever its size, and it is read in large pieces."""

from __future__ import annotations

import hashlib
import io
import os
import random
from pathlib import Path
from typing import Any

import pytest

from forge_core.store import digests
from forge_core.store.digests import data_digest


@pytest.mark.parametrize("size", [0, 1, 1000, 1001, 2999, 3000])
def test_of_a_file_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 1000)
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    expected = (hashlib.sha256(content).hexdigest(), size)
    assert data_digest(tmp_path / "file") == data_digest(content) == expected


def test_of_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        data_digest(tmp_path)


def test_it_is_read_in_large_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While other threads of Python work, reading and hashing a piece each wait 5 ms for the interpreter's lock."""
    opened = Path.open
    reads: list[int] = []

    class Noted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            reads.append(count := super().readinto(buffer))
            return count

    def open_noted(path: Path, *arguments: Any, **options: Any) -> Any:
        with opened(path, *arguments, **options) as file:
            return Noted(os.dup(file.fileno()))

    (tmp_path / "file").write_bytes(bytes(40 << 20))
    monkeypatch.setattr(Path, "open", open_noted)
    assert data_digest(tmp_path / "file")[1] == 40 << 20
    assert reads == [16 << 20, 16 << 20, 8 << 20, 0]

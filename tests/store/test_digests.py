"""The digest of a file is sha256 whatever its size, and does not wait for other threads piece by small piece."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import deque
from pathlib import Path

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


def test_a_busy_thread_of_python_hardly_delays_it(tmp_path: Path) -> None:
    """Reading and hashing each wait 5 ms for the interpreter's lock: in pieces of 256 KiB, 64 MiB would take 2.5 s."""
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    done = threading.Event()
    busy = threading.Thread(target=lambda: deque(iter(done.is_set, True), maxlen=0))
    busy.start()
    try:
        started = time.monotonic()
        data_digest(tmp_path / "file")
        seconds = time.monotonic() - started
    finally:
        done.set()
        busy.join()
    assert seconds < 1.2

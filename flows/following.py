"""Printing log files, and what is added to them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.3


def print_files(files: list[Path]) -> None:
    """The whole of each file, under its name."""
    for path in files:
        _name(path)
        sys.stdout.write(path.read_text(errors="replace"))
    sys.stdout.flush()


def follow(files: Callable[[], list[Path]]) -> None:
    """Print ``files()``, then what is added to them and to new ones, until interrupted. A file that got shorter was
    rotated: it is printed from its beginning."""
    printed: dict[Path, int] = {}  # bytes that were read: what is added while they are printed comes next
    last = None
    for last in files():
        _name(last)
        sys.stdout.write(_added(last, printed))
    sys.stdout.flush()
    while True:
        for path in [path for path in files() if path.suffix == ".log"]:
            added = _added(path, printed)
            if added:
                if path != last:
                    _name(path)
                last = path
                sys.stdout.write(added)
                sys.stdout.flush()
        time.sleep(POLL_S)


def _added(path: Path, printed: dict[Path, int]) -> str:
    try:
        with path.open("rb") as file:
            start = printed.get(path, 0)
            file.seek(start if file.seek(0, 2) >= start else 0)
            body = file.read()
            printed[path] = file.tell()
    except FileNotFoundError:  # rotated or removed at this moment
        return ""
    return body.decode(errors="replace")


def _name(path: Path) -> None:
    print(f"==> {path} <==", flush=True)

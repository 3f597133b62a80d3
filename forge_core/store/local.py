"""The store on a local or network disk (``file://``).

- ``create`` links a complete, synced temporary file to its name: the link either makes the name or fails.
- ``write`` renames a complete, synced temporary file over the name.
- Stored files are read-only: they may have further hard links in local caches.
- No key leads out of the root, through symbolic links either.
- Temporary files live in ``.tmp`` below the root, where ``.cache`` belongs to others; no key begins with a dot.
- The clock is that of the file system, which may be a server's: the one that stamps files.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from forge_core.store.backend import Unfinished
from forge_core.store.errors import NotFound, StoreError

T = TypeVar("T")
_COPY_PIECE = 4 * 1024 * 1024  # bytes
PLACE_ATTEMPTS = 50
_STALE_S = 86_400.0  # a temporary file untouched for a day belongs to a process that was killed
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class LocalBackend:
    longest_poll_s = 0.5

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.folder: Path | None = self.root
        self.uri = f"file://{self.root}"
        self._real = os.path.realpath(self.root)
        for temporary in self.unfinished():
            if self.now() - temporary.since > _STALE_S:
                self.discard(temporary)

    def create(self, path: str, body: bytes, nonce: str) -> bool:
        with self._writing(path), self._temporary(body, nonce) as temporary:
            return self._place(path, lambda target: _link(temporary, target))

    def write(self, path: str, data: bytes | Path, *, given: bool = False) -> None:
        """A file that is ``given`` and lies on this file system is linked, not copied."""
        with self._writing(path), self._temporary(data, uuid.uuid4().hex, given) as temporary:
            self._place(path, lambda target: os.replace(temporary, target))

    def read(self, path: str) -> bytes:
        with self._reading(path):
            return self._at(path).read_bytes()

    def read_range(self, path: str, start: int, end: int) -> bytes:
        with self._reading(path), self._at(path).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def download(self, path: str, target: Path) -> None:
        """A hard link where it is possible: it takes no space, and outlives the deletion of the object."""
        with self._reading(path):
            if not _linked(self._at(path), target):
                shutil.copyfile(self._at(path), target)

    def exists(self, path: str) -> bool:
        with self._reading(path):
            return self._at(path).is_file()

    def list(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for parent, folders, names in os.walk(self._at(folder)):
            if Path(parent) == self.root:
                folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    file = Path(parent, name)
                    found[file.relative_to(self.root).as_posix()] = file.stat().st_size
        return dict(sorted(found.items()))

    def total(self) -> int:
        return sum(self.list("").values())

    def folders(self, folder: str) -> builtins.list[str]:
        try:
            with os.scandir(self._at(folder)) as entries:
                return sorted(e.name for e in entries if e.is_dir() and not (not folder and e.name.startswith(".")))
        except _MISSING:
            return []

    def delete(self, path: str) -> None:
        with self._writing(path):
            self._at(path).unlink(missing_ok=True)
        _remove_empty(self.root, self._at(path).parent)

    def now(self) -> float:
        with self._writing(".tmp"), self._temporary(b"", uuid.uuid4().hex) as temporary:
            return temporary.stat().st_mtime

    def written_at(self, path: str) -> float:
        with self._reading(path):
            return self._at(path).stat().st_mtime

    def unfinished(self) -> builtins.list[Unfinished]:
        folder, found = self.root / ".tmp", []
        with self._reading(".tmp"):
            for name in os.listdir(folder) if folder.is_dir() else ():
                with suppress(FileNotFoundError):  # its writer, or another process, has just removed it
                    stat = (folder / name).stat()
                    found.append(Unfinished(f".tmp/{name}", name, stat.st_size, stat.st_mtime))
        return found

    def discard(self, unfinished: Unfinished) -> None:
        with self._writing(unfinished.path):
            (self.root / ".tmp" / unfinished.handle).unlink(missing_ok=True)

    def _at(self, path: str) -> Path:
        """Where ``path`` is. Raises StoreError when a symbolic link leads out of the root (which may be one itself)."""
        place = os.path.realpath(self.root / path)
        if place != self._real and not place.startswith(os.path.join(self._real, "")):
            raise StoreError(
                f"{path} in the store {self.uri} leads out of the store, to {place}: remove the symbolic link; a store "
                "on several disks is a matter of the file system"
            )
        return self.root / path

    def _place(self, path: str, place: Callable[[Path], T]) -> T:
        """Put a file at ``path``, durably; again when a concurrent delete has removed the new, empty folder."""
        target = self._at(path)
        for attempt in range(PLACE_ATTEMPTS):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                return _place_durably(target, place)
            except (FileNotFoundError, FileExistsError):  # mkdir says "exists" of a folder that has just gone
                if attempt + 1 == PLACE_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    @contextmanager
    def _temporary(self, data: bytes | Path, nonce: str, given: bool = False) -> Iterator[Path]:
        """A complete and synced file that nobody else knows."""
        folder = self.root / ".tmp"
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / nonce
        try:
            if not (given and isinstance(data, Path) and _taken(data, temporary)):
                _write(data, temporary)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except _MISSING as error:
            raise NotFound(self.uri, path) from error
        except OSError as error:
            raise self._error(path, error) from error

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(path, error) from error

    def _error(self, path: str, error: OSError) -> StoreError:
        if error.errno == errno.ENOSPC:
            remedy = "free some space, or set store=... to a folder on another disk"
        else:
            remedy = f"make {self.root} a folder that you may write to and that knows hard links, or set store=..."
        file = f" ({error.filename})" if error.filename else ""
        return StoreError(f"{path} in the store {self.uri}: {error.strerror}{file}: {remedy}")


def _place_durably(target: Path, place: Callable[[Path], T]) -> T:
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        result = place(target)
        os.fsync(folder)
        return result
    finally:
        os.close(folder)


def _write(data: bytes | Path, target: Path) -> None:
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444), "wb") as file:
        if isinstance(data, Path):
            with data.open("rb") as source:
                shutil.copyfileobj(source, file, _COPY_PIECE)
        else:
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _taken(source: Path, target: Path) -> bool:
    """Whether ``target`` could be made a link to the file ``source``, which is synced and read-only from here on."""
    if not _linked(source, target):
        return False
    target.chmod(0o444)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    return True


def _linked(source: Path, target: Path) -> bool:
    """Whether ``target`` is a new hard link to ``source``; False where there can be none."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _link(source: Path, target: Path) -> bool:
    """Whether ``target`` was free for a link to ``source``."""
    try:
        os.link(source, target)
    except FileExistsError:
        # A network file system may make the link and lose the reply; then both names are one file.
        return os.path.samefile(source, target)
    return True


def _remove_empty(root: Path, folder: Path) -> None:
    """Remove ``folder`` and its parents up to the root as long as they are empty."""
    while folder != root:
        try:
            folder.rmdir()
        except OSError:
            return  # not empty or gone: it may stay
        folder = folder.parent

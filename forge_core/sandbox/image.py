"""The file system that code in a sandbox sees: a copy of this Python, its standard library, and nothing else.

Guarantees:
- No file of the host is in it but those of the interpreter: the executable, the standard library without its tests,
  and the shared libraries that these link to. No installed package.
- It is built once per interpreter and user, below /var/tmp, and used by every sandbox of this machine, read-only.
  One that no sandbox has used for a week is removed when another is built.
- What lies there is used only when it belongs to this user, nobody else can write to it, and no file of it is missing.

A copy, and not the host's own folders, because the user that runs the code cannot reach a Python below a private home,
and because one mount is set up faster than thirty.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from forge_core.sandbox.errors import SandboxError

FOLDER = Path("/var/tmp")  # unlike a home or TMPDIR, every user can reach it
UNUSED_S = 7 * 24 * 3600.0
NOTED_S = 3600.0  # so often it is noted that an image is used
INSIDE = Path(__file__).with_name("inside")
PYTHON, LIBRARIES, HARNESS = "/python/bin/python3", "/libs", "/forge"
DEVICES = ("null", "zero", "random", "urandom")
_LEFT_OUT = (
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"),
    *("config-*", "_tkinter*", "_test*", "_ctypes_test*", "_xxtestfuzz*", "*.opt-*.pyc", "turtle.py"),
)
_LIBRARY = re.compile(r"(\S+) => (/\S+) \(")
_LOADER = re.compile(r"^\s+(/\S+) \(", re.MULTILINE)
_FILES = "files.json"


def image() -> Path:
    """The folder to mount as ``/``. Builds it when it is missing or not whole. Raises SandboxError."""
    root = _private(FOLDER / f"forge-sandbox-{os.geteuid()}")
    found = root / _identity()
    if not _whole(found):
        _remove_unused(root)
        _build(root, found)
    mark_used(found)
    return found


def mark_used(found: Path) -> None:
    """Keep the image for another week."""
    if time.time() - found.stat().st_mtime > NOTED_S:
        os.utime(found)


def _private(folder: Path) -> Path:
    """``folder``, which nobody but this user can change."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o755)  # whatever the umask is
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SandboxError(f"sandbox: {folder} belongs to somebody else, or others can write to it: remove it")
    return folder


def _identity() -> str:
    """Changes with the interpreter, its libraries and what runs inside."""
    parts = [sys.version, *_LEFT_OUT]
    for path in (_executable(), _standard_library(), *sorted(INSIDE.glob("*.py")), Path(__file__)):
        parts += [str(path), str(path.stat().st_mtime_ns)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _executable() -> Path:
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _whole(folder: Path) -> bool:
    """Whether every file is there: a cleaner of temporary files removes the ones that nobody reads."""
    with contextlib.suppress(OSError, ValueError):
        expected = json.loads((folder / _FILES).read_text())
        return _sizes(folder) == expected
    return False


def _sizes(folder: Path) -> dict[str, int]:
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return {str(path.relative_to(folder)): path.lstat().st_size for path in paths if path.name != _FILES}


def _remove_unused(root: Path) -> None:
    """Images of other interpreters and releases, and what a killed build left, when nobody has used them for long."""
    for folder in root.iterdir():
        if time.time() - folder.stat().st_mtime > UNUSED_S:
            shutil.rmtree(folder, ignore_errors=True)


def _build(root: Path, target: Path) -> None:
    """Make the image aside and move it into place; whoever is first wins."""
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        _fill(folder)
        (folder / _FILES).write_text(json.dumps(_sizes(folder)))
        _open_to_all(folder)
        if target.exists() and not _whole(target):
            shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process was first
            folder.rename(target)
    except OSError as error:
        raise SandboxError(f"sandbox: no copy of Python could be made in {root}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not _whole(target):
        raise SandboxError(f"sandbox: {target} is not whole although it was just made: remove {root}")


def _fill(folder: Path) -> None:
    library = folder / "python" / sys.platlibdir / _standard_library().name
    left_out = shutil.ignore_patterns(*_LEFT_OUT)
    shutil.copytree(_standard_library(), library, ignore=left_out, ignore_dangling_symlinks=True)
    shutil.copytree(INSIDE, folder / HARNESS[1:], ignore=shutil.ignore_patterns("__pycache__"))
    _copy(_executable(), folder / PYTHON[1:])
    _copy_libraries(folder, [_executable(), *library.glob("lib-dynload/*.so")])
    for name in ("dev", "proc", "tmp"):
        (folder / name).mkdir()
    for name in DEVICES:
        (folder / "dev" / name).touch()
    (folder / "dev/shm").symlink_to("/tmp")
    (folder / "dev/fd").symlink_to("/proc/self/fd")
    _compile(folder)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _copy_libraries(folder: Path, programs: list[Path]) -> None:
    """What ``ldd`` says that ``programs`` link to, and the loader where they look for it."""
    listing = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    for name, path in set(_LIBRARY.findall(listing)):
        _copy(Path(path), folder / LIBRARIES[1:] / name)
    for path in set(_LOADER.findall(listing)):
        _copy(Path(path), folder / path[1:])


def _compile(folder: Path) -> None:
    """Bytecode of what has none: the sandbox could not keep it."""
    programs = [folder / "python", folder / HARNESS[1:]]
    argv = [sys.executable, "-I", "-m", "compileall", "-q", "-s", str(folder), "-p", "/", *map(str, programs)]
    subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)  # some files are no Python


def _open_to_all(folder: Path) -> None:
    """Whatever the umask was: another user is to read it."""
    for parent, _, names in os.walk(folder):
        os.chmod(parent, 0o755)
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)

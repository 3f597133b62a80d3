"""Objects of the user's own code, named in a configuration as ``module:name`` or ``file.py:name``.

Guarantees:
- Nothing is evaluated: the part before the last colon is a module or a file, the part after it an attribute.
- A file is looked for in the working directory first, then in ``folder`` (that of the configuration).
- A changed file is imported anew; an unchanged one is imported once per process.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class ObjectPathError(ValueError):
    """A path that names no importable object; the message holds the path and the original error."""


def load_object(path: str, folder: Path | None = None) -> Any:
    """The object that ``path`` names. Raises ObjectPathError."""
    target, name = split_path(path)
    module = _import_file(path, folder) if target.endswith(".py") else _import_module(path, folder)
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        public = sorted(key for key in own if not key.startswith("_"))
        raise ObjectPathError(f"{path}: {target} has no {name!r}; it has {', '.join(public) or 'no function or class'}")
    return getattr(module, name)


def source_file(path: str, folder: Path | None = None) -> Path:
    """The Python file that defines the module of ``path``."""
    target, _ = split_path(path)
    if target.endswith(".py"):
        return find_file(path, folder)
    origin = getattr(_import_module(path, folder), "__file__", None)
    if origin is None or not origin.endswith(".py"):
        raise ObjectPathError(f"{path}: the module {target} has no Python source file")
    return Path(origin)


def split_path(path: str) -> tuple[str, str]:
    """``(module or file, attribute)`` of a path."""
    target, _, name = path.rpartition(":")
    if not target or not name.isidentifier():
        raise ObjectPathError(f"{path}: write <module>:<name> or <file.py>:<name>")
    return target, name


def find_file(path: str, folder: Path | None = None) -> Path:
    """The existing file of a ``file.py:name`` path."""
    target, _ = split_path(path)
    candidates = [root / Path(target).expanduser() for root in (Path.cwd(), folder) if root is not None]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise ObjectPathError(
        f"{path}: no such file: {' or '.join(str(candidate) for candidate in candidates)} (a configuration's files are "
        "looked for in the working directory, then in the folder of the configuration file)"
    )


def _import_module(path: str, folder: Path | None) -> ModuleType:
    target, _ = split_path(path)
    for root in (Path.cwd(), folder):
        _search(root)
    try:
        return importlib.import_module(target)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ObjectPathError(f"{path}: importing {target} failed: {type(error).__name__}: {error}") from error


def _import_file(path: str, folder: Path | None) -> ModuleType:
    file = find_file(path, folder)
    digest = hashlib.sha256(str(file).encode() + file.read_bytes()).hexdigest()[:12]
    name = f"{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    _search(file.parent)  # so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # as above
        del sys.modules[name]
        raise ObjectPathError(f"{path}: importing {file} failed: {type(error).__name__}: {error}") from error
    return module


def _search(root: Path | None) -> None:
    """Let modules be found in ``root``, after everything that is installed."""
    if root is not None and str(root) not in sys.path:
        sys.path.append(str(root))

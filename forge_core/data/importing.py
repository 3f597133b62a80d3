"""Objects of the user's own code, named in a configuration as ``module:name`` or ``file.py:name``.

Guarantees:
- Nothing is evaluated: the part before the last colon is a module or a file, the part after it an attribute.
- A file is looked for in the working directory first, then in ``folder`` (that of the configuration).
- A changed file is imported anew; an unchanged one is imported once per process.
- ``source_file`` imports nothing: what a path names can be looked at before any of it runs.
- A module's attribute is that module's own, or of its package: what it merely imported is refused, so the digest of
  the source file speaks for the object.
- ``check_place``: a store names code and never supplies it. A path that was read from a store is used only where its
  file is installed, or lies below a folder in ``FORGE_CODE_PATH`` (default: the working directory).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

CODE_PATH = "FORGE_CODE_PATH"
FORGE = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("forge_core", "tasks", "flows")
_PLAIN = (float, int, bool, str)


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
    found = getattr(module, name)
    _check_own(path, module, found)
    return found


def misfit(function: Any, /, *arguments: Any, **keywords: Any) -> TypeError | None:
    """Why ``function`` cannot be called with these arguments, found without calling it. None: it can, or it is written
    in C and does not say what it takes."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except ValueError:
        return None
    except TypeError as error:
        return error
    return None


def mistyped(function: Any, options: Mapping[str, Any]) -> str | None:
    """Which of the ``options`` is not of the plain type (float, int, bool, str) that ``function`` declares for it, in
    words without its value, which may be a secret. References to variables may stand for anything."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except Exception:  # annotations are the user's code; a signature may be missing
        return None
    for name, value in options.items():
        wanted = parameters[name].annotation if name in parameters else None
        if wanted not in _PLAIN or (isinstance(value, str) and "${" in value):
            continue
        if not isinstance(value, (int, float) if wanted is float else wanted):
            return f"{name} is of type {type(value).__name__}, and declared as {wanted.__name__}"
    return None


def _check_own(path: str, module: ModuleType, found: Any) -> None:
    """Refuse what a module has only imported: the digest of its source says nothing about that."""
    home = getattr(found, "__module__", None)
    if not (inspect.isclass(found) or inspect.isroutine(found)) or home is None:
        return
    if home != module.__name__ and home.partition(".")[0] != module.__name__.partition(".")[0]:
        name = path.rpartition(":")[2]
        raise ObjectPathError(f"{path}: {name} is defined in {home}: name it there ({home}:{name}), or define your own")


def source_file(path: str, folder: Path | None = None) -> Path:
    """The Python file that defines the module of ``path``, found without importing anything."""
    target, _ = split_path(path)
    if target.endswith(".py"):
        return find_file(path, folder)
    for root in (Path.cwd(), folder):
        _search(root)
    origin = _module_spec(path, target).origin
    if origin is None or not origin.endswith(".py"):
        raise ObjectPathError(f"{path}: the module {target} has no Python source file")
    return Path(origin).resolve()


def _module_spec(path: str, target: str) -> ModuleSpec:
    """``importlib.util.find_spec`` would import the packages that ``target`` lies in."""
    parent, _, _ = target.rpartition(".")
    search = _module_spec(path, parent).submodule_search_locations if parent else None
    specs = (finder.find_spec(target, search) for finder in sys.meta_path)
    found: ModuleSpec | None = next((spec for spec in specs if spec is not None), None)
    if found is None:
        raise ObjectPathError(f"{path}: there is no module {target}: install it, or go to the folder that has it")
    return found


def check_place(path: str) -> Path:
    """The source file of ``path``, which was read from a store. Raises ObjectPathError unless the file is this
    machine's to offer: nothing was imported then."""
    target, file = split_path(path)[0], source_file(path)
    if any(file.is_relative_to(root) for root in code_path()) or _installed(target, file):
        return file
    raise ObjectPathError(
        f"{path}: {file} is neither installed nor below a folder of {CODE_PATH} "
        f"({os.pathsep.join(map(str, code_path()))}): what a store names is only looked for there: add the folder to "
        f"{CODE_PATH}, or go to it"
    )


def code_path() -> list[Path]:
    """The folders in ``FORGE_CODE_PATH``, separated as in ``PATH``; the working directory where it is not set."""
    folders = [part for part in os.environ.get(CODE_PATH, "").split(os.pathsep) if part]
    return [Path(part).expanduser().resolve() for part in folders] or [Path.cwd().resolve()]


def _installed(target: str, file: Path) -> bool:
    """Whether ``file`` is a part of Forge or of an installed distribution. The standard library is none: it holds no
    reward, but much that runs whatever it is told to."""
    site = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    if any(file.is_relative_to(FORGE / package) for package in OWN_PACKAGES):
        return True
    if any(file.is_relative_to(folder) for folder in site):
        return True
    return not target.endswith(".py") and target.partition(".")[0] in packages_distributions()


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

"""What this machine can run and what is missing: ``forge doctor``.

Every check names what it found and, when something is amiss, the command that mends it. Only a missing *essential*
makes the verdict bad: the rest (a GPU, vLLM, a sandbox) widens what can be done. Nothing is downloaded or started; the
store is written to and cleaned up again.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from flows.check import Check
from flows.doctor_engines import cores, engine_checks
from flows.doctor_store import store_checks
from flows.home import ServerError, forge_home, prepare_home

DISTRIBUTION = "forge-rl"
ESSENTIAL = ("torch", "torchtitan", "transformers", "prefect", "sqlalchemy", "importlib_metadata")
WHY = {
    "sqlalchemy": "with 2.1 Prefect's scheduler creates no scheduled run",
    "importlib_metadata": "Prefect's workers need it and do not declare it",
}
LOW_MEMORY = 4 * 2**30
LOW_DISK = 5 * 2**30


def report(store: str | None = None, home: Path | None = None) -> list[Check]:
    """Check this machine; with ``store`` (a URI) also whether that store can be used."""
    checks = [
        *_installation(),
        _processor(),
        *engine_checks(),
        _sandbox(),
        _home(home),
        _disk("disk of the Forge home", forge_home(home)),
    ]
    if store is not None:
        checks += store_checks(store)
        if "://" not in store or store.startswith("file://"):
            checks.append(_disk("disk of the store", Path(store.removeprefix("file://")).expanduser()))
    return checks


def healthy(checks: Sequence[Check]) -> bool:
    """Whether every essential check is good."""
    return all(check.ok for check in checks if check.essential)


def _installation() -> list[Check]:
    """Python and the essential packages, against what Forge's own metadata asks for."""
    try:
        forge = metadata(DISTRIBUTION)
    except PackageNotFoundError:
        remedy = "run `pip install -e .` in the source tree"
        return [Check(DISTRIBUTION, False, "not installed: run from a bare source tree", remedy, essential=True)]
    found, wanted = platform.python_version(), forge["Requires-Python"]
    ok = SpecifierSet(wanted).contains(found, prereleases=True)
    python = Check("python", ok, f"{found} ({sys.executable})", "" if ok else f"use Python {wanted}", essential=True)
    return [Check(DISTRIBUTION, True, forge["Version"], essential=True), python, *(_package(n) for n in ESSENTIAL)]


def _package(name: str) -> Check:
    """Whether ``name`` is installed in a version that Forge's own metadata asks for."""
    parsed = (Requirement(line) for line in requires(DISTRIBUTION) or ())
    requirement = next(r for r in parsed if r.name == name and r.marker is None)
    wanted = f"{name}{requirement.specifier}"
    why = f" ({WHY[name]})" if name in WHY else ""
    try:
        found = version(name)
    except PackageNotFoundError:
        return Check(name, False, "not installed" + why, f"pip install '{wanted}'", essential=True)
    if not requirement.specifier.contains(found, prereleases=True):
        return Check(name, False, f"{found}, not {wanted}{why}", f"pip install '{wanted}'", essential=True)
    return Check(name, True, found, essential=True)


def _processor() -> Check:
    memory = _memory()
    detail = f"{cores()} cores, {memory / 2**30:.1f} GiB memory"
    if memory < LOW_MEMORY:
        return Check("cores and memory", False, detail, f"training needs about {LOW_MEMORY / 2**30:.0f} GiB at least")
    return Check("cores and memory", True, detail)


def _memory() -> int:
    """Bytes of memory this process may use: the machine's, or less where a control group says so."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return machine if text == "max" else min(machine, int(text))


def _sandbox() -> Check:
    path = shutil.which("bwrap")
    if path:
        return Check("bubblewrap", True, path)
    return Check(
        "bubblewrap", False, "not found: rewards that run code are refused", "install bubblewrap (apt, dnf or conda)"
    )


def _home(home: Path | None) -> Check:
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        return Check("prefect server", True, f"{configured} (PREFECT_API_URL)", essential=True)
    folder = forge_home(home)
    try:
        prepare_home(folder)
    except ServerError as error:
        return Check("prefect server", False, str(error), "set FORGE_HOME to a folder you can write", essential=True)
    return Check("prefect server", True, f"started with each run; database and log in {folder}", essential=True)


def _disk(name: str, folder: Path) -> Check:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / 2**30:.1f} GiB free at {existing}"
    if free < LOW_DISK:
        return Check(name, False, detail, "free some space, or choose another folder (FORGE_HOME, store=)")
    return Check(name, True, detail)

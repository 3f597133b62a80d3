"""What a benchmark's JSON says of where it was made: commit, machine, versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from forge_core import nvidia_smi

RESULTS = Path(__file__).parent / "results"


def provenance() -> dict[str, Any]:
    """Commit (with ``-dirty`` when the tree differs), processor, cores, memory, GPUs, versions and the time."""
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    dirty = "-dirty" if _output("git", "status", "--porcelain", "--untracked-files=no") else ""
    names = [name for name in ("torch", "torchtitan", "transformers", "prefect", "vllm") if _installed(name)]
    return {
        "commit": commit + dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "cards": [name for (name,) in nvidia_smi.ask("name")],
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


def write(name: str, result: dict[str, Any], *, quiet: bool = False) -> Path:
    """Write ``benchmarks/results/<name>.json`` (or below ``$OUT``) and print it, unless ``quiet``."""
    folder = Path(os.environ.get("OUT", RESULTS))
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    if not quiet:
        print(json.dumps(result, indent=2))
    return path


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _output(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())

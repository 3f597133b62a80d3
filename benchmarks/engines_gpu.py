"""What only a GPU can show of the engines, correctness first: one script, a part at a time.

    python -m benchmarks.engines_gpu                                  # all parts that the machine has the GPUs for
    python -m benchmarks.engines_gpu --parts sleep oom
    python -m benchmarks.engines_gpu --device cpu                     # the same code in small, where it needs no GPU

| part | GPUs | what must hold |
|---|---|---|
| `sleep` | 1 | a run whose generator sleeps while the trainer works: its numbers are the trainer's after every update |
| `sleep_apart` | 1 | the same with a trainer in a process of its own |
| `vllm_tp` | 2 | an engine on two GPUs, with CUDA graphs, chooses the tokens of transformers, also after a swap |
| `ranks` | 2 | data- and tensor-parallel ranks (NCCL) train like one rank |
| `pipeline` | 2 | so do the stages of a pipeline |
| `stuck` | 2 | a rank that hangs is an error after `comm.timeout_s`, and its group leaves nothing on the GPUs |
| `export` | 1 | what a trainer on the last GPU publishes is what it computes with, tensor for tensor |
| `float8` | 1 | training in float8 stays close to bfloat16; where it cannot be done it is refused by key |
| `oom` | 1 | memory that runs out in a role ends with the role, the table and the settings to lower |
| `memory` | 1 | what `forge config --estimate` says a role takes is about what it takes |
| `kill` | 1 | a run that is killed with `kill -9` leaves nothing on the GPU, and goes on |

A part sees as many GPUs as it needs, ``export`` all. Every part is a process of its own (``engines_parts.py``) with a
time limit and a log; a part that fails, hangs or dies does not stop the next, and the JSON is written after each. The
exit status is 1 when something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, provenance, write
from forge_core.devices import Placement, visible_gpus
from forge_core.processes import ChildGroup

GPUS = {
    "sleep": 1,
    "sleep_apart": 1,
    "vllm_tp": 2,
    "ranks": 2,
    "pipeline": 2,
    "stuck": 2,
    "export": 1,
    "float8": 1,
    "oom": 1,
    "memory": 1,
    "kill": 1,
}
ALL_GPUS = {"export"}  # parts that are about more GPUs than they need


def run_part(name: str, args: argparse.Namespace, folder: Path, out: Path) -> dict[str, Any]:
    """``status``: ok, wrong (with what), skipped (with why), failed or timeout (with the end of the log)."""
    gpus = visible_gpus() if args.device == "cuda" else ()
    if args.device == "cuda" and len(gpus) < GPUS[name]:
        return {"status": "skipped", "why": f"needs {GPUS[name]} GPUs, there are {len(gpus)}"}
    log, answer, started = out / f"engines_gpu_{name}.log", folder / f"{name}.json", time.monotonic()
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.engines_parts", name, args.device, args.shape, str(answer)]
    shown = Placement.environment(gpus if name in ALL_GPUS else gpus[: GPUS[name]])
    group = ChildGroup(name, command, log=log, env={"TMPDIR": str(folder), **shown})
    try:
        status = group.wait(args.limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        logs = logs_of_runs(folder)  # they are deleted with the part
        group.kill()
    found = json.loads(answer.read_text()) if answer.exists() else {}
    found["seconds"] = round(time.monotonic() - started, 1)
    if status == 0 and found.get("status"):
        return found
    ended = {"status": "timeout" if status is None else "failed", "log": group.tail(40).splitlines(), "logs": logs}
    return {**found, **ended}  # with what was measured before


def logs_of_runs(folder: Path) -> dict[str, list[str]]:
    """The end of what the part's own runs printed."""
    found = {}
    for log in sorted(folder.rglob("*.log")):
        with contextlib.suppress(OSError):  # removed meanwhile
            found[str(log.relative_to(folder))] = log.read_text(errors="replace").splitlines()[-40:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", help="of the models that are timed or measured: tiny, 0.6B, 1.7B")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a part")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    args.shape = args.shape or ("0.6B" if args.device == "cuda" else "tiny")
    out = Path(os.environ.get("OUT", RESULTS))
    settings = {k: str(v) for k, v in vars(args).items()}
    where = {**provenance(), "settings": settings, "gpus": list(visible_gpus())}  # a part can be measured alone
    parts: dict[str, Any] = {}
    for name in args.parts:
        folder = Path(tempfile.mkdtemp(prefix="forge-part-", dir=args.folder))
        try:
            parts[name] = {**run_part(name, args, folder, out), **where}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(name, json.dumps(parts[name])[:2000], flush=True)
        write("engines_gpu", {"benchmark": "engines_gpu", "parts": parts})
    if any(part["status"] not in ("ok", "skipped") for part in parts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

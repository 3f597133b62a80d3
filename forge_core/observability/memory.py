"""Memory of this machine, and an out-of-memory error that says what to do.

``memory_guard`` turns what torch, vLLM and Python raise when memory runs out, on a GPU or on the CPU, into one
``OutOfMemory``: the role, what was asked for, who has the memory, and the settings to lower. Every other error passes
through unchanged.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_core.nvidia_smi import ask

GIB = 1024**3
SETTINGS: dict[str, tuple[str, ...]] = {
    "trainer": (
        "training.token_budget (lower)",
        "training.activation_checkpointing=full",
        "training.dtype=bfloat16",
        "parallelism.data_parallel_shard_degree or parallelism.tensor_parallel_degree (raise, with more GPUs)",
    ),
    "hf generator": ("generator.max_batch (lower)", "rollout.max_new_tokens (lower)", "generator.dtype=bfloat16"),
    "vllm generator": (
        "generator.engine_args.gpu_memory_utilization (lower beside another process, higher for too few cache blocks)",
        "generator.engine_args.kv_cache_memory_bytes (lower, where it is set)",
        "generator.engine_args.max_num_seqs (lower)",
        "training.seq_len (lower)",
    ),
    "warm start": (
        "training.token_budget (lower)",
        "training.activation_checkpointing=full",
        "training.dtype=bfloat16",
    ),
    "reward model": ("rewards.functions, the options of reward_model: batch_size (lower), dtype=bfloat16, device=cpu",),
    "reference model": ("services.ref_model.with_gpus=false", "training.token_budget (lower)"),
}
_TEXTS = (
    "CUDA out of memory",
    "HIP out of memory",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "failure 2 'out of memory'",
    "DefaultCPUAllocator: can't allocate memory",
    "not enough memory: you tried to allocate",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "not enough GPU memory available to serve even a single token",
    "is less than desired GPU memory utilization",
    "is less than desired CPU memory utilization",
    "is less than requested memory for kv",
)
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": GIB, "TiB": 1024 * GIB}
_CGROUP = Path("/sys/fs/cgroup")


class OutOfMemory(RuntimeError):
    """A role needs more memory than there is; its text has the memory table and the settings to lower."""


@contextmanager
def memory_guard(
    role: str, settings: Iterable[str], sizes: Callable[[], Mapping[str, int]] | None = None
) -> Iterator[None]:
    """Raise OutOfMemory for any error that means it. ``settings``: what to lower (such as ``SETTINGS[role]``).
    ``sizes``: bytes of what the role holds, by name, as far as it knows."""
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(_message(role, error, settings, sizes() if sizes else {})) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or an error that caused it, says that memory ran out."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    found = isinstance(error, kinds) or any(text.lower() in str(error).lower() for text in _TEXTS)
    return found or (error.__cause__ is not None and is_out_of_memory(error.__cause__))


def machine_memory() -> tuple[int, int]:
    """Total and available bytes of this machine, or of the container that this process may not leave (Linux)."""
    fields = _fields(Path("/proc/meminfo"))
    total, available = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    limit = _number(_CGROUP / "memory.max")
    if limit is None:
        return total, available
    used = (_number(_CGROUP / "memory.current") or 0) - _fields(_CGROUP / "memory.stat").get("inactive_file", 0)
    return min(total, limit), min(available, max(limit - used, 0))


def model_sizes(
    parameters: Iterable[Any], optimizer_states: Iterable[Mapping[Any, Mapping[str, Any]]]
) -> dict[str, int]:
    """Bytes that this rank holds of parameters, gradients and optimizer states (``optimizer.state``)."""
    parameters = list(parameters)
    states = [value for state in optimizer_states for values in state.values() for value in values.values()]
    return {
        "parameters": sum(map(_local_bytes, parameters)),
        "gradients": sum(_local_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(_local_bytes(value) for value in states if hasattr(value, "element_size")),
    }


def memory_table(sizes: Mapping[str, int] | None = None) -> str:
    """Who has the memory: this process, the machine, every GPU, and what ``sizes`` names."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    total, available = machine_memory()
    resident = _fields(Path("/proc/self/status")).get("VmRSS", 0)
    rows = [
        ("this process", {"resident": resident, "peak": peak}),
        ("machine", {"total": total, "available": available}),
        *_gpu_rows(),
    ]
    if sizes:
        rows.append(("of which this role", {**sizes, **_working_memory(sum(sizes.values()))}))
    return "\n".join(f"  {name}: " + ", ".join(f"{key} {_text(n)}" for key, n in row.items()) for name, row in rows)


def _message(role: str, error: Exception, settings: Iterable[str], sizes: Mapping[str, int]) -> str:
    requested = _requested(error)
    asked = f", when {_text(requested)} more were asked for" if requested is not None else ""
    lower = "".join(f"\n  {setting}" for setting in settings) or "\n  none: free some memory on this machine"
    said = "; ".join(_said(error))
    return f"{role}: out of memory{asked}\n{memory_table(sizes)}\nsettings that change it:{lower}\n({said})"


def _said(error: Exception) -> list[str]:
    """The first line of an error, and the first that says that memory ran out."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    naming = [line for line in lines if any(text.lower() in line.lower() for text in _TEXTS)]
    return list(dict.fromkeys([lines[0], *naming[:1]]))


def _requested(error: BaseException) -> int | None:
    found = _REQUEST.search(str(error))
    if found is None:
        return _requested(error.__cause__) if error.__cause__ is not None else None
    return int(float(found[1]) * _UNITS[found[2]])


def _gpu_rows() -> list[tuple[str, dict[str, int]]]:
    """The memory of each GPU that this process uses, as torch sees it; if it uses none (a child's ran out), of all as
    the driver does: asking torch would take memory on each of them, if there is any."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return _driver_rows()
    rows = []
    for i in _own_gpus(torch):
        free, total = torch.cuda.mem_get_info(i)
        allocated, reserved = torch.cuda.memory_allocated(i), torch.cuda.memory_reserved(i)
        row = {"total": total, "free": free, "allocated by torch": allocated, "reserved by torch": reserved}
        rows.append((f"GPU {i}", {**row, "others": max(total - free - reserved, 0)}))
    return rows or _driver_rows()  # torch may know of GPUs that it has not used


def _working_memory(held: int) -> dict[str, int]:
    """What this process had on its GPUs at most, besides ``held`` bytes."""
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return {}
    peak = sum(map(torch.cuda.max_memory_allocated, _own_gpus(torch)))
    return {"activations and buffers (peak)": max(peak - held, 0)}


def _own_gpus(torch: Any) -> list[int]:
    """The GPUs that this process uses, by torch's numbers."""
    return [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]


def _driver_rows() -> list[tuple[str, dict[str, int]]]:
    rows = ask("index", "memory.total", "memory.free")
    known = [[int(field) for field in row] for row in rows if all(field.isdigit() for field in row)]  # some are [N/A]
    return [(f"GPU {i}", {"total": total * 1024**2, "free": free * 1024**2}) for i, total, free in known]


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def _fields(path: Path) -> dict[str, int]:
    """Numbers of a file with lines ``name number`` or ``Name: number kB``, in bytes."""
    text = path.read_text() if path.exists() else ""
    found = re.findall(r"^(\w+):?\s+(\d+)( kB)?$", text, re.MULTILINE)
    return {name: int(number) * (1024 if kilo else 1) for name, number, kilo in found}


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None


def _text(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 1024**2:.2f} MiB"

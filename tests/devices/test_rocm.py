"""What only CUDA has is named in few modules, each of which does without on ROCm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]
CUDA_ONLY = re.compile(
    r"get_device_capability|nvidia|pynvml|nvml|cudart|cublas|cudnn|CUDA_VISIBLE|cuda\.nvtx|out_dtype=|_scaled_mm|gencode",
    re.IGNORECASE,
)
GUARDED = {
    "forge_core/devices.py": "HIP_VISIBLE_DEVICES beside it, and AMD's device files beside NVIDIA's",
    "forge_core/gpu_leases.py": "asks nvidia_smi; else a GPU is known by its index",
    "forge_core/nvidia_smi.py": "finds no program, and says nothing",
    "forge_core/observability/memory.py": "asks nvidia_smi; texts of errors",
    "flows/doctor_engines.py": "says what is off",
    "forge_core/training/float8.py": "asks torch.version.hip",
    "forge_core/training/logprob_kernels.py": "asks torch.version.hip",
}


def test_what_only_cuda_has_is_named_where_there_is_a_way_without_it() -> None:
    files = [path for folder in ("forge_core", "flows", "tasks") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if CUDA_ONLY.search(_code(path))}
    assert found == GUARDED.keys(), "guard it with torch.version.hip, and say here how it does without"


@pytest.mark.parametrize("name", [name for name, how in GUARDED.items() if "version.hip" in how])
def test_these_ask_which_torch_it_is(name: str) -> None:
    assert "torch.version.hip" in _code(ROOT / name)


def _code(path: Path) -> str:
    """Without comments and docstrings."""
    text = re.sub(r'"""(.|\n)*?"""', "", path.read_text())
    return "\n".join(line.partition("  #")[0] for line in text.splitlines() if not line.lstrip().startswith("#"))

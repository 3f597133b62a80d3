"""Whether torch is the build for ROCm that was asked for: ROCM_VERSION, and kernels for PYTORCH_ROCM_ARCH (if set)."""

import os
import sys

import torch


def problem() -> str | None:
    hip, version = torch.version.hip, os.environ.get("ROCM_VERSION")
    if hip is None:
        return f"torch {torch.__version__} is no build for ROCm: check TORCH_INDEX"
    if version and not hip.startswith(f"{version}."):
        return f"torch {torch.__version__} is built for ROCm {hip}, not for ROCM_VERSION {version}"
    kernels = torch._C._cuda_getArchFlags() or ""
    wanted = (os.environ.get("PYTORCH_ROCM_ARCH") or "").replace(";", " ").split()
    missing = [arch for arch in wanted if arch not in kernels.split()]
    return f"torch has no kernels for {', '.join(missing)}, only for {kernels}" if missing else None


if __name__ == "__main__":
    sys.exit(problem())

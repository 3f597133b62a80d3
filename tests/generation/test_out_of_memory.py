"""A generator that gets no more memory says so, with what to lower."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.generation.hf import HFGenerator
from forge_core.observability.memory import OutOfMemory
from tests.generation.conftest import request

pytestmark = pytest.mark.engine

SCARCE = """
import resource, sys
from pathlib import Path
from forge_core.generation.hf import HFGenerator
from forge_core.observability.memory import OutOfMemory
from tests.generation.conftest import request
folder = Path(sys.argv[1])
engine = HFGenerator(lambda version: folder, version=0, threads=1, max_batch=4096)
engine.generate([request("12")])
large = [request("1" * 240, seed) for seed in range(4096)]
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 64 * 2**20, resource.RLIM_INFINITY))
try:
    engine.generate(large)
except OutOfMemory as error:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(error)
print(len(engine.generate([request("12")])), "completion afterwards")
"""


def test_the_error_names_the_role_the_request_and_the_settings_and_the_engine_goes_on(tiny: Path) -> None:
    process = subprocess.run([sys.executable, "-c", SCARCE, str(tiny)], capture_output=True, text=True, timeout=120)
    assert process.stdout.startswith("generator: out of memory, when "), process.stdout + process.stderr
    for part in ("machine: total", "generator.max_batch", "settings that change it", "1 completion afterwards"):
        assert part in process.stdout


def test_new_weights_that_find_no_memory_leave_the_old_ones(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine = HFGenerator(lambda version: tiny, version=0, threads=1)
    with monkeypatch.context() as patch:
        patch.setattr("forge_core.generation.hf.load_into", scarce)
        with pytest.raises(OutOfMemory, match=r"generator: out of memory, when 2\.00 GiB more"):
            engine.update_weights(1)
    assert engine.get_version() == 0
    assert len(engine.generate([request("12")])) == 1
    engine.shutdown()

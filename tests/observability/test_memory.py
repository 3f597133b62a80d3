"""Memory that runs out ends with the role, the numbers and the settings to lower; nothing else is changed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from forge_core.observability.memory import (
    GIB,
    SETTINGS,
    OutOfMemory,
    machine_memory,
    memory_guard,
    memory_table,
    model_sizes,
)

ABSURD = 2**50  # bytes


def guarded(role: str, work, sizes=None) -> str:
    with pytest.raises(OutOfMemory) as caught, memory_guard(role, SETTINGS[role], sizes):
        work()
    return str(caught.value)


def test_a_failed_allocation_names_role_size_memory_and_settings() -> None:
    text = guarded("trainer", lambda: torch.empty(ABSURD, dtype=torch.uint8), lambda: {"parameters": 3 * GIB})
    assert text.startswith("trainer: out of memory, when 1048576.00 GiB more were asked for\n")
    assert re.search(
        r"this process: resident [\d.]+ \w+, peak [\d.]+ \w+\n  machine: total [\d.]+ GiB, available", text
    )
    assert "of which this role: parameters 3.00 GiB" in text
    for setting in (
        "training.token_budget",
        "training.activation_checkpointing=full",
        "parallelism.",
        "training.dtype",
    ):
        assert setting in text
    assert "DefaultCPUAllocator" in text


def test_pythons_own_memory_error_is_one_too() -> None:
    text = guarded("reference model", lambda: bytearray(ABSURD))
    assert text.startswith("reference model: out of memory\n")
    assert "services.ref_model.with_gpus=false" in text


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("EngineCore died: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0", "2.50 GiB"),
        ("HIP out of memory. Tried to allocate 20.00 MiB", "20.00 MiB"),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", None),
        ("2.1 GiB KV cache is needed, which is larger than the available KV cache memory (1.2 GiB)", None),
        ("Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token", None),
        ("Free memory on device cuda:0 on startup is less than desired GPU memory utilization (0.9)", None),
        ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:119", None),
        ("torch.AcceleratorError: CUDA error: out of memory", None),
        ("HIP error: out of memory", None),
        ("ncclUnhandledCudaError: Cuda failure 2 'out of memory'", None),
    ],
)
def test_what_an_engine_in_a_child_process_says_is_understood(message: str, asked: str | None) -> None:
    def work() -> None:
        raise RuntimeError(message)

    text = guarded("vllm generator", work)
    assert ("asked for" in text) == (asked is not None)
    assert asked is None or f"when {asked} more" in text
    assert "generator.engine_args.gpu_memory_utilization" in text


def test_the_line_that_says_so_is_quoted_with_the_first() -> None:
    said = "vllm-0 died: it did not start; ValueError: No available memory for the cache blocks"
    with pytest.raises(OutOfMemory, match=re.escape(f"({said})")), memory_guard("generator", ()):
        raise RuntimeError(said.replace("; ", "\n  see above\n  "))


def test_other_errors_pass_unchanged_and_inner_roles_are_kept() -> None:
    error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as caught, memory_guard("trainer", ()):
        raise error
    assert caught.value is error
    with pytest.raises(OutOfMemory, match="inner: out of memory"), memory_guard("outer", ()), memory_guard("inner", ()):
        raise MemoryError


def test_an_error_that_memory_caused_is_one_too() -> None:
    def work() -> None:
        try:
            torch.empty(ABSURD, dtype=torch.uint8)
        except RuntimeError as error:
            raise ValueError("the step failed") from error

    assert "when 1048576.00 GiB more" in guarded("trainer", work)


def test_the_machine_has_more_in_all_than_is_available() -> None:
    total, available = machine_memory()
    assert 0 < available < total


def test_a_models_memory_is_counted_by_what_it_is_for() -> None:
    model = torch.nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert model_sizes(model.parameters(), [optimizer.state]) == {"parameters": 4000, "gradients": 0, "optimizer": 0}
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    sizes = model_sizes(model.parameters(), [optimizer.state])
    assert (sizes["gradients"], sizes["optimizer"]) == (4000, 8004)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_is_full_is_in_the_table() -> None:
    held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    text = guarded("trainer", lambda: torch.empty(2**45, dtype=torch.uint8, device="cuda"), lambda: {"parameters": GIB})
    assert re.search(r"GPU 0: total [\d.]+ GiB, free [\d.]+ GiB, allocated by torch 1\.\d\d GiB, reserved", text)
    assert "activations and buffers (peak)" in text
    del held


def test_the_table_asks_no_torch_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert "machine: total" in memory_table()


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine with two GPUs, one of which shares its memory with the CPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 81559, 80000'\necho '1, [N/A], [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_a_driver_that_does_not_know_the_memory_of_a_gpu_spoils_no_message(
    driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")  # with a GPU torch answers instead
    table = memory_table()
    assert "GPU 0: total 79.65 GiB, free 78.12 GiB" in table
    assert "GPU 1" not in table


@pytest.mark.parametrize("initialized", [False, True])
def test_a_process_that_uses_no_gpu_has_the_drivers_figures(
    initialized: bool, driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch counts as initialized once it has told a GPU's name, which uses none."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: False, raising=False)
    assert "GPU 0: total 79.65 GiB, free 78.12 GiB" in memory_table()

"""A thread's own device is the one that its engine's tensors are on: torch takes the first GPU's queue, memory and
random state otherwise, and a wait for that queue does not wait for what another GPU does."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.algorithms.losses import GRPOLoss
from forge_core.devices import work_on
from forge_core.generation.hf import HFGenerator
from forge_core.reference.model import ReferenceModel
from forge_core.training import hf_export
from forge_core.training.settings import TrainerSettings
from forge_core.training.trainer import TitanTrainer
from tests.training.tiny_models import saved

SOURCES = Path(hf_export.__file__).parents[1]
# Functions of torch.cuda that are about the calling thread's device unless they are given one.
OF_THE_THREAD = {
    *("current_stream", "synchronize", "get_rng_state", "set_rng_state", "mem_get_info", "memory_allocated"),
    *("max_memory_allocated", "memory_reserved", "reset_peak_memory_stats", "get_device_properties", "Stream"),
    *("get_device_name", "get_device_capability", "default_stream", "memory_stats"),
}
BY_DESIGN = {
    "training/checkpoint.py",  # the trainer's own thread
    "observability/tracing.py",  # the user's thread, as torch would have it
}


class Told(Exception):
    pass


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that threads were given; the first GPU call ends the work, as there is none."""
    devices: list[torch.device] = []

    def note(device: torch.device) -> None:
        devices.append(device)
        raise Told

    monkeypatch.setattr(torch.cuda, "set_device", note)
    return devices


def engines(folder: Path, device: str) -> dict[str, Callable[[], Any]]:
    trainer = TitanTrainer(folder, TrainerSettings(seq_len=16, token_budget=64), GRPOLoss(beta=0.0), device=device)
    return {
        "trainer": trainer.setup,
        "reference": ReferenceModel(folder, token_budget=64, seq_len=16, device=device).setup,
        "generator": lambda: HFGenerator(lambda _: folder, version=0, device=device),
    }


@pytest.mark.parametrize("role", ["trainer", "reference", "generator"])
def test_an_engine_gives_its_thread_its_own_gpu(role: str, told: list[torch.device]):
    with pytest.raises(Told):
        engines(saved("qwen3-tied")[0], "cuda:1")[role]()
    assert told == [torch.device("cuda:1")]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_what_names_no_gpu_leaves_the_thread_with_its_own(name: str, told: list[torch.device]):
    """Torch refuses a device without a number here."""
    work_on(torch.device(name))
    assert told == []


def test_an_export_waits_for_the_gpu_that_the_parameters_are_on(monkeypatch: pytest.MonkeyPatch):
    waited: list[torch.device] = []

    class Queue:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", Queue)
    hf_export._wait_for_copies(torch.device("cuda:1"))
    hf_export._wait_for_copies(torch.device("cpu"))
    assert waited == [torch.device("cuda:1")]


def without_a_device(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr in OF_THE_THREAD and ast.unparse(node.func.value) == "torch.cuda":
            arguments = len(node.args) - (node.func.attr == "set_rng_state")
            if arguments < 1 and not any(k.arg == "device" for k in node.keywords):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_code_takes_the_threads_device_for_its_own():
    found = {
        str(path.relative_to(SOURCES)): lines
        for path in sorted(SOURCES.rglob("*.py"))
        if (lines := list(without_a_device(ast.parse(path.read_text()))))
    }
    assert set(found) == BY_DESIGN, found


def test_the_check_sees_a_call_without_a_device():
    assert list(without_a_device(ast.parse("torch.cuda.current_stream().synchronize()")))
    assert not list(without_a_device(ast.parse("torch.cuda.current_stream(device).synchronize()")))

"""A trainer that gets no more memory says so, with what it holds and what to lower, and can go on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forge_core.observability.memory import OutOfMemory
from forge_core.store import folder_files, open_store
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.stored import StoredTrainer
from tests.training.tiny_models import saved

pytestmark = pytest.mark.engine

SCARCE = """
import resource
from pathlib import Path
from forge_core.algorithms.ops import Totals
from forge_core.observability.memory import OutOfMemory
from forge_core.store import folder_files, open_store
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.stored import StoredTrainer
from tests.training.tiny_models import samples, saved
store = open_store("memory://scarce")
store.publish("model", folder_files(saved("qwen3-tied")[0]), request="model")
trainer = StoredTrainer(store, "model", TrainerSettings(seq_len=64, token_budget=32768), SFTLoss(), threads=1)
trainer.setup()
step = lambda count: trainer.train_samples(samples(count), totals=Totals(1000, count), temperature=1.0)
step(4)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 16 * 2**20, resource.RLIM_INFINITY))
try:
    step(1500)
except OutOfMemory as error:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(error)
trainer.cleanup()
trainer.setup()
print(step(4)[1].grad_norm > 0, "afterwards")
"""


def test_the_error_has_the_request_what_the_trainer_holds_and_the_settings() -> None:
    process = subprocess.run([sys.executable, "-c", SCARCE], capture_output=True, text=True, timeout=120)
    assert process.stdout.startswith("trainer: out of memory, when "), process.stdout + process.stderr
    held = ("of which this role: parameters ", "optimizer ")
    for part in ("machine: total", *held, "training.token_budget", "DefaultCPUAllocator", "True afterwards"):
        assert part in process.stdout


@pytest.mark.parametrize(
    ("function", "act"),
    [
        ("trainer.state_digest", lambda trainer: trainer.state_digest()),
        ("trainer.save_checkpoint", lambda trainer: trainer.upload_checkpoint("new/", {})),
        ("trainer.load_checkpoint", lambda trainer: trainer.load_checkpoint("checkpoint/")),
        ("trainer.export", lambda trainer: trainer.upload_weights("weights/")),
    ],
)
def test_what_moves_weights_may_run_out_of_memory_too(
    monkeypatch: pytest.MonkeyPatch, function: str, act: Callable[[StoredTrainer], Any]
) -> None:
    def scarce(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    store = open_store("memory://moves")
    store.publish("model", folder_files(saved("qwen3-tied")[0]), request="model")
    trainer = StoredTrainer(store, "model", TrainerSettings(seq_len=64, token_budget=256), SFTLoss(), threads=1)
    trainer.setup()
    store.publish_uploaded("checkpoint/", trainer.upload_checkpoint("checkpoint/", {}), request="checkpoint")
    monkeypatch.setattr(f"forge_core.training.{function}", scarce)
    with pytest.raises(OutOfMemory, match=r"trainer: out of memory, when 2\.00 GiB more(.|\n)*parameters"):
        act(trainer)
    trainer.cleanup()

"""A trainer's life: lazy imports, status, threads, two engines in one process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from forge_core.engine_thread import EngineThread
from forge_core.reference.model import ReferenceModel
from forge_core.training.packing import pack
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer
from tests.training.tiny_models import samples, saved

pytestmark = pytest.mark.engine


def test_importing_the_trainer_imports_neither_torchtitan_nor_transformers() -> None:
    code = (
        "import sys, forge_core.training.trainer, forge_core.reference.model;"
        "print([m for m in ('torchtitan', 'transformers', 'prefect') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_trainer_and_a_reference_in_threads_of_their_own_share_a_process() -> None:
    folder, _ = saved("qwen3-tied")
    batches = pack(samples(), 128, pad_id=0, seq_len=64)
    prompts = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9])]

    def losses(trainer: TitanTrainer) -> list[float]:
        return [trainer.train_step(batches)[0].loss for _ in range(3)]

    alone = TitanTrainer(folder, TrainerSettings(learning_rate=1e-2, seq_len=64), SFTLoss())
    alone.setup()
    expected = losses(alone)

    first, second = EngineThread("trainer", threads=1), EngineThread("reference", threads=1)
    trainer = TitanTrainer(folder, alone.settings, SFTLoss())
    reference = ReferenceModel(folder, token_budget=128, seq_len=64)
    second.call(reference.setup)
    before = second.call(reference.forward, prompts)
    first.call(trainer.setup)
    assert first.call(losses, trainer) == expected
    assert second.call(reference.forward, prompts) == before
    first.close()
    second.close()


def test_status_and_config_tell_where_the_trainer_stands() -> None:
    folder, model = saved("qwen3-tied")
    settings = TrainerSettings(learning_rate=0.5, warmup_steps=4, seq_len=64)
    trainer = TitanTrainer(folder, settings, SFTLoss(), threads=1)
    assert trainer.get_status() == {"ready": False, "step": 0, "has_gradients": False, "learning_rate": 0.125}
    trainer.setup()
    trainer.train_step(pack(samples(), 128, pad_id=0, seq_len=64))
    status = trainer.get_status()
    assert status == {
        "ready": True,
        "step": 1,
        "has_gradients": False,
        "learning_rate": 0.25,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    config = json.loads(json.dumps(trainer.get_config()))
    assert (config["model_dir"], config["device"], config["warmup_steps"]) == (str(folder), "cpu", 4)


def test_a_trainer_works_only_between_setup_and_cleanup() -> None:
    trainer = TitanTrainer(saved("llama2")[0], TrainerSettings(seq_len=64), SFTLoss())
    batches = pack(samples(), 128, pad_id=0, seq_len=64)
    with pytest.raises(RuntimeError, match=r"call setup\(\) first"):
        trainer.forward_backward(batches)
    trainer.setup()
    digest = trainer.state_digest()
    trainer.train_step(batches)
    trainer.cleanup()
    with pytest.raises(RuntimeError, match=r"call setup\(\) first"):
        trainer.state_digest()
    trainer.setup()
    assert trainer.state_digest() == digest
    assert trainer.get_status()["step"] == 0

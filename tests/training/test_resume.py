"""A checkpoint continues training bit for bit, in the same process and in another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge_core.training import checkpoint
from forge_core.training.packing import pack
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer
from tests.training.tiny_models import samples, saved

pytestmark = pytest.mark.engine


def trainer_of(folder: Path, dtype: str = "float32") -> TitanTrainer:
    settings = TrainerSettings(
        learning_rate=1e-2, warmup_steps=2, lr_decay="cosine", total_steps=8, seq_len=64, weight_decay=0.1, dtype=dtype
    )
    trainer = TitanTrainer(folder, settings, SFTLoss(), threads=1)
    trainer.setup()
    return trainer


def train(trainer: TitanTrainer, steps: range) -> list[tuple[float, float, float]]:
    """Train on a batch that depends on the step alone; (loss, gradient norm, learning rate) of each."""
    found = []
    for step in steps:
        batches = pack(samples(seed=step), 128, pad_id=0, seq_len=64)
        result, done = trainer.train_step(batches)
        found.append((result.loss, done.grad_norm, done.learning_rate))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    folder, _ = saved("qwen3-tied")
    whole = trainer_of(folder, dtype)
    train(whole, range(3))
    whole.save(tmp_path, {"cursor": {"epoch": 1, "index": 7}})
    expected = train(whole, range(3, 6))

    resumed = trainer_of(folder, dtype)
    assert resumed.load(tmp_path) == {"cursor": {"epoch": 1, "index": 7}}
    assert resumed.get_status()["step"] == 3
    assert train(resumed, range(3, 6)) == expected
    assert resumed.state_digest() == whole.state_digest()


def test_a_checkpoint_of_many_files_continues_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 20_000)
    folder, _ = saved("qwen3-tied")
    whole = trainer_of(folder)
    train(whole, range(2))
    whole.save(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 8, "more than are written at a time"
    assert files[0].name == f"shard-00001-model-00001-of-{len(files):05d}.safetensors"
    expected = train(whole, range(2, 4))

    resumed = trainer_of(folder)
    resumed.load(tmp_path)
    assert train(resumed, range(2, 4)) == expected
    assert resumed.state_digest() == whole.state_digest()


_CHILD = """
import sys
from pathlib import Path
from tests.training.test_resume import train, trainer_of
trainer = trainer_of(Path(sys.argv[1]))
trainer.load(Path(sys.argv[2]))
print(train(trainer, range(3, 6)), trainer.state_digest())
"""


def test_another_process_continues_bit_for_bit(tmp_path: Path) -> None:
    folder, _ = saved("llama3-tied")
    whole = trainer_of(folder)
    train(whole, range(3))
    whole.save(tmp_path)
    expected = f"{train(whole, range(3, 6))} {whole.state_digest()}"
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(folder), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert child.stdout.strip().splitlines()[-1] == expected


def test_a_trainer_goes_back_to_its_own_checkpoint_and_forgets_gradients(tmp_path: Path) -> None:
    trainer = trainer_of(saved("smollm2")[0])
    trainer.save(tmp_path)
    digest = trainer.state_digest()
    first = train(trainer, range(2))
    trainer.forward_backward(pack(samples(), 128, pad_id=0, seq_len=64))
    assert trainer.state_digest() != digest
    trainer.load(tmp_path)
    assert trainer.state_digest() == digest
    assert not trainer.get_status()["has_gradients"]
    assert train(trainer, range(2)) == first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_pass_between_two_calls_changes_nothing(tmp_path: Path, dtype: str) -> None:
    trainer = trainer_of(saved("llama2")[0], dtype)
    batches = pack(samples(), 128, pad_id=0, seq_len=64)
    digest = trainer.state_digest()
    logprobs = trainer.logprobs(batches)
    assert trainer.state_digest() == digest
    trainer.save(tmp_path)
    train(trainer, range(2))
    assert trainer.logprobs(batches) != logprobs
    trainer.load(tmp_path)
    assert trainer.logprobs(batches) == logprobs


def test_the_random_state_of_torch_is_restored(tmp_path: Path) -> None:
    trainer = trainer_of(saved("smollm2")[0])
    torch.manual_seed(5)
    trainer.save(tmp_path)
    expected = torch.rand(3)
    trainer.load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_the_digest_depends_on_every_parameter_and_nothing_else() -> None:
    trainer, other = trainer_of(saved("qwen2-tied")[0]), trainer_of(saved("qwen2-tied")[0])
    assert trainer.state_digest() == other.state_digest()
    with torch.no_grad():
        trainer._model.layers["1"].attention.qkv_linear.wk.bias[0] += 1e-6
    assert trainer.state_digest() != other.state_digest()


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    trainer_of(saved("qwen3-tied")[0]).save(tmp_path)
    other = trainer_of(saved("llama2")[0])
    digest = other.state_digest()
    with pytest.raises(ValueError, match=r"checkpoint of another model: .* tensors differ, such as model"):
        other.load(tmp_path)
    assert other.state_digest() == digest


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no trainer\.json"):
        trainer_of(saved("llama2")[0]).load(tmp_path)

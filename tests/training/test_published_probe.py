"""Published weights say what they compute, in the trainer's own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.models import probe
from forge_core.training.packing import pack
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer
from tests.training.tiny_models import samples, saved

pytestmark = pytest.mark.engine


def made(**changes: Any) -> TitanTrainer:
    settings = TrainerSettings(**{"learning_rate": 1e-2, "seq_len": 64, "token_budget": 128, **changes})
    trainer = TitanTrainer(saved("qwen3-tied")[0], settings, SFTLoss(), threads=1)
    trainer.setup()
    return trainer


@torch.no_grad()
def by_transformers(folder: Path) -> list[list[float]]:
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), probe.read(folder)
    assert found is not None
    ids = torch.tensor(found["token_ids"])
    return torch.log_softmax(model(ids).logits[:, :-1], -1).gather(2, ids[:, 1:, None]).squeeze(2).tolist()


def test_the_probe_is_what_the_published_weights_compute(tmp_path: Path) -> None:
    trainer = made()
    for step in ("before", "after"):
        trainer.push_weights(tmp_path / step)
        found = probe.read(tmp_path / step)
        assert found is not None
        probe.check(found, by_transformers(tmp_path / step), "float32", 0)
        trainer.train_step(pack(samples(), 128, pad_id=0, seq_len=64))
    before, after = probe.read(tmp_path / "before"), probe.read(tmp_path / "after")
    assert before is not None
    assert after is not None
    with pytest.raises(probe.ProbeFailed):  # one step is further than two engines are from each other
        probe.check(before, after["logprobs"], "float32", 0)


def test_rounded_weights_are_published_with_a_probe_of_their_type(tmp_path: Path) -> None:
    made(weights_dtype="bfloat16").push_weights(tmp_path)
    found = probe.read(tmp_path)
    assert found is not None
    assert found["dtype"] == "bfloat16"
    probe.check(found, by_transformers(tmp_path), "float32", 0)


def test_publishing_does_not_change_how_training_goes_on(tmp_path: Path) -> None:
    batches = pack(samples(), 128, pad_id=0, seq_len=64)
    quiet, publishing = made(), made()
    for step in range(3):
        publishing.push_weights(tmp_path / str(step))
        assert publishing.train_step(batches) == quiet.train_step(batches)
    assert publishing.state_digest() == quiet.state_digest()


def test_short_rows_have_a_probe_that_leaves_room_for_a_token(tmp_path: Path) -> None:
    made(seq_len=9).push_weights(tmp_path)
    found = probe.read(tmp_path)
    assert found is not None
    assert {len(row) for row in found["token_ids"]} == {8}

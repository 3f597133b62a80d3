"""The model is shaped for several ranks: two processes shard it, and their gradients are those of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge_core.algorithms.ops import Totals
from forge_core.training.packing import pack
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer
from tests.training.tiny_models import samples, saved

pytestmark = pytest.mark.engine

_RANK = """
import sys
from pathlib import Path
import torch.distributed as dist
from tests.training.test_ranks import two_steps
folder, out, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(str(out / "rendezvous"), 2), rank=rank, world_size=2)
two_steps(folder, rank, 2, out)
dist.barrier()
dist.destroy_process_group()
"""


def two_steps(folder: Path, rank: int, ranks: int, out: Path) -> TitanTrainer:
    """Train on this rank's share of the micro-batches; write a checkpoint after one step and the second one's norm."""
    trainer = TitanTrainer(folder, TrainerSettings(learning_rate=1e-2, seq_len=64), SFTLoss(), threads=1)
    trainer.setup()
    for step in range(2):
        batches = pack(samples(16, seed=step), 128, pad_id=0, seq_len=64)
        batches = batches[: len(batches) // 2 * 2]
        totals = Totals(int(sum(batch.target_mask.sum() for batch in batches)), 16)
        _, done = trainer.train_step(batches[rank::ranks], totals=totals)
        if step == 0:
            trainer.save(out / "checkpoint")
    if rank == 0:
        (out / "norm").write_text(str(done.grad_norm))
    return trainer


def test_two_ranks_step_like_one_and_one_rank_loads_their_checkpoint(tmp_path: Path) -> None:
    folder, alone, together = saved("qwen3-tied")[0], tmp_path / "alone", tmp_path / "together"
    for out in (alone, together):
        out.mkdir()
    ranks = [
        subprocess.Popen([sys.executable, "-c", _RANK, str(folder), str(together), str(rank)]) for rank in range(2)
    ]
    trainer = two_steps(folder, 0, 1, alone)
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    norms = [float((out / "norm").read_text()) for out in (alone, together)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)

    trainer.load(alone / "checkpoint")
    expected = {name: p.detach().clone() for name, p in trainer._model.named_parameters()}
    trainer.load(together / "checkpoint")
    for name, parameter in trainer._model.named_parameters():
        assert torch.allclose(parameter, expected[name], atol=1e-5), name

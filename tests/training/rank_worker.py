"""What each process of a test with several ranks does: a few GRPO steps, and what came of them as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from forge_core.algorithms.losses.grpo import GRPOLoss
from forge_core.algorithms.ops import Totals
from forge_core.training.packing import Sample
from forge_core.training.settings import TrainerSettings
from forge_core.training.trainer import TitanTrainer
from tests.training.tiny_models import samples

STEPS = 4
Work = Callable[[int, Path], Any]


def spawn(work: Work, ranks: int, out: Path) -> list[Any]:
    """Run ``work(rank, out)`` in ``ranks`` processes of one gloo group; what each returned."""
    out.mkdir(parents=True, exist_ok=True)
    mp.spawn(_rank, (work, ranks, out), nprocs=ranks)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank(rank: int, work: Work, ranks: int, out: Path) -> None:
    torch.set_num_threads(1)
    join(rank, ranks, out / "rendezvous")
    (out / f"{rank}.json").write_text(json.dumps(work(rank, out)))
    dist.barrier()
    dist.destroy_process_group()


def join(rank: int, ranks: int, file: Path) -> None:
    """Make the process group; ``file``: where its ranks meet."""
    dist.init_process_group("gloo", store=dist.FileStore(str(file), ranks), rank=rank, world_size=ranks)


def trainer_of(folder: Path, **settings: Any) -> TitanTrainer:
    common: dict[str, Any] = {"learning_rate": 1e-3, "seq_len": 64, "token_budget": 128, "warmup_steps": 2}
    loss = GRPOLoss(beta=0.1, agg_type="sequence_mean", entropy_coef=0.01)
    trainer = TitanTrainer(folder, TrainerSettings(**common | settings), loss, threads=1)
    trainer.setup()
    return trainer


def grpo_samples(step: int, count: int = 11) -> list[Sample]:
    """An odd number of documents of unequal lengths, with reference log-probabilities."""
    given = samples(count, seed=step)
    return [replace(s, ref_logprobs=[x - 0.05 for x in s.generator_logprobs or []]) for s in given]


def totals_of(given: list[Sample]) -> Totals:
    return Totals(sum(sum(s.loss_mask) for s in given), len(given))


def train(trainer: TitanTrainer, steps: range) -> list[dict[str, float]]:
    """Loss, gradient norm and metrics of each step."""
    found = []
    for step in steps:
        given = grpo_samples(step)
        result, done = trainer.train_samples(given, totals=totals_of(given), temperature=0.9)
        found.append({"loss": result.loss, "grad_norm": done.grad_norm, **result.metrics})
    return found

"""Peak memory of a training step, measured: ``python -m tests.runs.peak_memory FOLDER`` prints it beside the estimate.

The steps of one process run in the order of their size, because a process can only ask for its peak so far.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import cast

from forge_core.algorithms.losses import build_loss
from forge_core.config import RunConfig, load_config
from forge_core.models.scratch import create
from forge_core.runs.memory_estimate import PROCESS, trainer_parts
from forge_core.runs.model_shape import model_shape
from forge_core.training.packing import PAD_ID, Sample, pack
from forge_core.training.settings import TrainerSettings
from forge_core.training.trainer import Loss, TitanTrainer

TINY = {"hidden_size": 64, "intermediate_size": 192, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
FIFTY_MILLION = {"hidden_size": 512, "intermediate_size": 1536, "num_layers": 16, "num_heads": 8, "num_kv_heads": 4}
STEPS = [
    (TINY, ["training.seq_len=64", "training.token_budget=512"]),
    (TINY, ["training.seq_len=128", "training.token_budget=16384"]),
    (FIFTY_MILLION, ["training.seq_len=128", "training.token_budget=256"]),
]


def main(folder: Path) -> None:
    """A JSON list of ``[measured, estimated]`` bytes of this process, one for each step."""
    found = []
    for number, (sizes, overrides) in enumerate(STEPS):
        characters = "".join(map(chr, range(0x4E00, 0x4E00 + (200 if sizes is TINY else 8000))))
        model = {**sizes, "head_dim": 64, "vocabulary": characters, "max_position_embeddings": 1024}
        config = load_config({"model": model, "rollout": {"max_new_tokens": 32}}, overrides)
        train(config, folder / str(number))
        found.append([peak_bytes(), PROCESS + sum(trainer_parts(config, model_shape(config), None).values())])
    print(json.dumps(found))


def peak_bytes() -> int:
    """Of this program alone: ``ru_maxrss`` also counts the process that started it, up to the exec."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def document(length: int) -> Sample:
    """Every token after the first counts."""
    counted, logprobs = [False] + [True] * (length - 1), [-1.0] * length
    return Sample([5] * length, counted, [1.0] * length, logprobs, logprobs)


def loss_of(config: RunConfig) -> Loss:
    return cast(Loss, build_loss(config))


def train(config: RunConfig, folder: Path) -> None:
    """Two micro-batches and an optimizer step: gradients are there when the second one runs."""
    folder.mkdir(parents=True)
    create(config.model, 0, folder)
    trainer = TitanTrainer(folder, TrainerSettings.from_config(config), loss_of(config), threads=2)
    trainer.setup()
    length = config.training.seq_len
    count = 2 * config.token_budget // (length - 1)
    trainer.train_step(pack([document(length)] * count, config.token_budget, PAD_ID, length))
    trainer.cleanup()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

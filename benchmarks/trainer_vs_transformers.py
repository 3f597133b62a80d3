"""TitanTrainer against a plain transformers training loop: same tiny model, same data, one run.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.trainer_vs_transformers --threads 1

Claim: the trainer is not slower. Both sides build tensors from lists of token ids, run forward and backward, clip the
gradient and step the same fused AdamW; the plain loop pads each batch to its longest document. Losses and gradient
norms must agree before anything is timed. Rounds are interleaved, so that both sides see the same load; figures are
medians. Two data sets: "short" is the quickstart batch (512 documents of 14 tokens, the last 6 trained on), "mixed" is
64 documents of 16 to 255 tokens (the second half trained on).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from forge_core.config.data_sections import ScratchModel
from forge_core.models.scratch import create
from forge_core.training.packing import Sample, pack
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer

MODEL = ScratchModel(vocabulary="0123456789+=,:darst")  # hidden 128, 2 layers: the quickstart's model
SETTINGS = TrainerSettings(learning_rate=3e-4, seq_len=256, token_budget=16384)
RESULT = Path(__file__).parent / "results" / "trainer_vs_transformers.json"
Step = Callable[[], tuple[float, float]]


def data_sets() -> dict[str, list[Sample]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 256, (64,), generator=generator).tolist()

    def sample(length: int, trained: int) -> Sample:
        tokens = torch.randint(2, 21, (length,), generator=generator).tolist()
        return Sample(tokens, [False] * (length - trained) + [True] * trained, [1.0] * length)

    return {"short": [sample(14, 6) for _ in range(512)], "mixed": [sample(n, n // 2) for n in lengths]}


def titan_step(folder: Path, samples: list[Sample]) -> Step:
    trainer = TitanTrainer(folder, SETTINGS, SFTLoss())
    trainer.setup()

    def step() -> tuple[float, float]:
        batches = pack(samples, SETTINGS.token_budget, pad_id=0, seq_len=SETTINGS.seq_len)
        result, done = trainer.train_step(batches)
        return result.loss, done.grad_norm

    return step


def plain_step(folder: Path, samples: list[Sample]) -> Step:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    longest = max(len(sample.tokens) for sample in samples)
    padded = any(len(sample.tokens) != longest for sample in samples)

    def column(values: list[list[Any]]) -> torch.Tensor:
        return torch.tensor([row + [0] * (longest - len(row)) for row in values])

    def step() -> tuple[float, float]:
        tokens, mask = column([s.tokens for s in samples]), column([s.loss_mask for s in samples])[:, 1:]
        attention = column([[1] * len(s.tokens) for s in samples]) if padded else None
        logits = model(tokens, attention_mask=attention).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = -(logprobs * mask).sum() / mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return step


def check_equal(steps: dict[str, Step]) -> None:
    """Three steps on each side must agree, which also warms both up."""
    for number in range(3):
        (loss, norm), (plain_loss, plain_norm) = steps["titan"](), steps["transformers"]()
        if abs(loss - plain_loss) > 1e-4 or abs(norm - plain_norm) > 1e-3 * plain_norm:
            raise SystemExit(f"step {number} differs: loss {loss} / {plain_loss}, norm {norm} / {plain_norm}")


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in sorted(steps, reverse=bool(number % 2)):
            started = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def compare(folder: Path, samples: list[Sample], rounds: int) -> dict[str, Any]:
    steps = {"titan": titan_step(folder, samples), "transformers": plain_step(folder, samples)}
    check_equal(steps)
    seconds = measure(steps, rounds)
    tokens = sum(len(sample.tokens) for sample in samples)
    found: dict[str, Any] = {"tokens": tokens}
    for name, times in seconds.items():
        found[name] = {"step_s": round(median(times), 4), "tokens_per_s": round(tokens / median(times))}
    ratios = [plain / titan for plain, titan in zip(seconds["transformers"], seconds["titan"], strict=True)]
    return found | {"speed_of_titan": round(median(ratios), 3)}


def machine(threads: int) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "commit": commit,
        "cpu": f"{names[0]} x {len(names)}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of both sides")
    parser.add_argument("--rounds", type=int, default=31, help="timed steps of each side")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    result: dict[str, Any] = {"machine": machine(arguments.threads), "rounds": arguments.rounds}
    with tempfile.TemporaryDirectory() as folder:
        create(MODEL, 0, Path(folder))
        for name, samples in data_sets().items():
            result[name] = compare(Path(folder), samples, arguments.rounds)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

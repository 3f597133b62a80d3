"""Supervised optimizer steps on one GPU: packed rows of 8,192 and 16,384 tokens, Qwen3-0.6B's shape, random weights.

    OUT=results .venv/bin/python -m benchmarks.sft_gpu
    .venv/bin/python -m benchmarks.sft_gpu --device cpu --shape tiny --seq-len 128 256 --steps 2 --documents 200

First, correctness: the loss of two optimizer steps on packed rows, by the trainer on this device in bfloat16 and in
float32, against transformers' float32 model on each document alone, and gradient norms against the float32 trainer on
the CPU. What is wrong is listed in the JSON, and the exit status is 1.

Then time, for each row length and setting. ``tokens_per_second``: tokens of documents, without padding, a second of
``train_samples`` (forward, backward, clipping, AdamW); ``with_loader``: the same with the data loader between steps, as
a run has it. Documents are texts of log-normal lengths (median 500 tokens, longest a row), packed by the loader. One
row a step at 16,384 tokens, two at 8,192. Others' figures for this shape on one H100: prime-rl 26,000 and 25,500.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import provenance, write
from benchmarks.shapes import CHARACTERS, random_model
from forge_core.data.loader import Loader, build_loader
from forge_core.data.sft_settings import SftDataConfig
from forge_core.training.packed_rows import PackedRows
from forge_core.training.settings import Dtype, TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer

SETTINGS = {  # name -> (compile, activation checkpointing)
    "eager": (False, "none"),
    "compile": (True, "none"),
    "compile-selective": (True, "selective"),
}
WARM_UP = 3
CHECKED = 128  # tokens of a row of the correctness check
TOLERANCE = {"float32": 2e-4, "bfloat16": 2e-2}  # relative, of losses and gradient norms


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="forge-sft-") as name:
        folder = Path(name)
        model = random_model(folder / "model", args.shape)
        data = texts(folder / "texts.jsonl", args.documents, longest=max(args.seq_len))
        result: dict[str, Any] = {**provenance(), "device": device_name(args.device), "shape": args.shape, "rows": []}
        result["problems"] = problems(folder, args.device)
        for seq_len in args.seq_len:
            for setting in args.settings:
                result["rows"].append(measured(model, data, seq_len, setting, args))
                write("sft_gpu", result)  # after every row: a later one may not fit
    raise SystemExit(1 if result["problems"] else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", default="0.6B", choices=("tiny", "0.6B", "1.7B"))
    parser.add_argument("--seq-len", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--settings", nargs="+", default=["eager"], choices=SETTINGS, help="default: eager")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps measured, after 3 to warm up")
    parser.add_argument("--documents", type=int, default=4000)
    return parser.parse_args()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def texts(file: Path, count: int, longest: int) -> Path:
    """Documents of log-normal lengths, in characters, which are the tokens of the random model."""
    draw = random.Random(0)
    with file.open("w") as out:
        for _ in range(count):
            length = min(max(round(draw.lognormvariate(6.2, 1.0)), 8), longest - 1)
            out.write(json.dumps({"text": "".join(draw.choices(CHARACTERS, k=length))}) + "\n")
    return file


def loader_of(model: Path, data: Path, seq_len: int) -> Loader:
    from transformers import AutoTokenizer

    section = SftDataConfig(path=str(data), format="text", masking="all")
    return build_loader(section, AutoTokenizer.from_pretrained(model), seq_len, seed=0)


def trainer_of(model: Path, seq_len: int, budget: int, device: str, setting: str, dtype: Dtype) -> TitanTrainer:
    compiled, checkpointing = SETTINGS[setting]
    settings = TrainerSettings(
        learning_rate=1e-5, seq_len=seq_len, token_budget=budget, dtype=dtype, weights_dtype="bfloat16"
    )
    settings = replace(settings, compile=compiled, activation_checkpointing=checkpointing)  # type: ignore[arg-type]
    trainer = TitanTrainer(model, settings, SFTLoss(), device=device)
    trainer.setup()
    return trainer


def step(trainer: TitanTrainer, rows: PackedRows) -> tuple[float, float]:
    """Loss and gradient norm of one optimizer step."""
    result, stepped = trainer.train_samples(rows, totals=rows.totals, temperature=1.0)
    return result.loss, stepped.grad_norm


def problems(folder: Path, device: str) -> list[str]:
    """What of the trainer's numbers on ``device`` is not transformers', or not the float32 trainer's on the CPU."""
    model = random_model(folder / "small", "tiny", dtype="float32")
    loader = loader_of(model, texts(folder / "short.jsonl", 200, longest=CHECKED), CHECKED)
    steps = [PackedRows.of(list(islice(loader, 4))) for _ in range(2)]
    exact = losses_of(trainer_of(model, CHECKED, 2 * CHECKED, "cpu", "eager", "float32"), steps)
    found = [] if close(alone(model, steps[0]), exact[0][0], "float32") else ["the CPU trainer's loss: transformers'"]
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        numbers = losses_of(trainer_of(model, CHECKED, 2 * CHECKED, device, "eager", dtype), steps)
        for number, (ours, theirs) in enumerate(zip(numbers, exact, strict=True)):
            for what, a, b in zip(("loss", "gradient norm"), ours, theirs, strict=True):
                if not close(a, b, dtype):
                    found.append(f"{what} of step {number} in {dtype} on {device}: {a} is not {b}")
    return found


def losses_of(trainer: TitanTrainer, steps: list[PackedRows]) -> list[tuple[float, float]]:
    numbers = [step(trainer, rows) for rows in steps]
    trainer.cleanup()
    return numbers


def close(a: float, b: float, dtype: str) -> bool:
    return abs(a - b) <= TOLERANCE[dtype] * abs(b)


@torch.no_grad()
def alone(folder: Path, rows: PackedRows) -> float:
    """The loss by transformers, each document alone in its batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    for number in range(rows.documents):
        here = rows.document_ids == number
        logits = model(torch.tensor(rows.input_ids[here][None]).long()).logits[0]
        targets = torch.tensor(rows.target_ids[here]).long()
        nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        total += float(nll[torch.tensor(rows.target_mask[here])].sum())
    return total / rows.totals.tokens


def measured(model: Path, data: Path, seq_len: int, setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """Speed of one setting: with rows that are there, and with the loader between steps."""
    budget = max(args.seq_len)
    loader = loader_of(model, data, seq_len)
    trainer = trainer_of(model, seq_len, budget, args.device, setting, "bfloat16")

    def take() -> PackedRows:
        return PackedRows.of(list(islice(loader, budget // seq_len)))

    for _ in range(WARM_UP):
        step(trainer, take())
    ready = [take() for _ in range(args.steps)]
    if args.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(args.device)
    alone_s = timed(lambda: [step(trainer, rows) for rows in ready])
    tokens = sum(rows.tokens for rows in ready)
    taken = []

    def with_loader() -> None:
        for _ in ready:
            rows = take()
            taken.append(rows.tokens)
            step(trainer, rows)

    loaded_s = timed(with_loader)
    trainer.cleanup()
    return {
        "seq_len": seq_len,
        "setting": setting,
        "steps": args.steps,
        "packed": tokens / sum(rows.input_ids.size for rows in ready),
        "tokens_per_second": tokens / alone_s,
        "with_loader": sum(taken) / loaded_s,
        "peak_memory_gib": peak(args.device),
    }


def timed(work: Any) -> float:
    """Seconds of work that ends with a number read from the device."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def peak(device: str) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.startswith("cuda") else None


if __name__ == "__main__":
    main()

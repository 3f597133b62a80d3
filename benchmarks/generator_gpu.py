"""Does our rollout task reach the speed of vLLM alone? Same prompts, lengths and sampling, in one run on one card.

    python -m benchmarks.generator_gpu [--shape 0.6B] [--groups 64] [--tokens 512]
    python -m benchmarks.generator_gpu --shape 135M --groups 96 --prompt 45 --tokens 64 --mean 10     # short responses

Raw: ``LLM.generate`` in a process of its own with the same engine settings, CUDA graphs on: with what RL needs (the
log-probabilities of the sampled tokens, a seed per request), as vLLM gives it and as flat lists, which is faster; and
plain. The goal is against the faster of the first two. Ours: the run's own rollout stage in its shards, from the stored
plan to published Parquet. First it is checked that every episode has its tokens and that log-probabilities of the
sampler agree with a forward pass of ``transformers``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import provenance, write
from benchmarks.overlap_gpu import Shaped
from benchmarks.shapes import random_model

SAMPLES = 8
FLAT: dict[str, Any] = {"logprobs": 0, "flat_logprobs": True}  # what our own requests have

RAW = """
import json, sys, time
start = json.load(open(sys.argv[1]))
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(**start["engine_args"])
    times = {}
    for name, extra in start["variants"].items():
        times[name] = []
        for batch in start["batches"]:
            more = [{"seed": s, **extra} if extra else {} for s in batch["seeds"]]
            lengths = [{"max_tokens": n} for n in batch["lengths"]]
            params = [SamplingParams(**start["params"], **n, **m) for n, m in zip(lengths, more)]
            t = time.perf_counter()
            out = llm.generate([{"prompt_token_ids": p} for p in batch["prompts"]], params, use_tqdm=False)
            times[name].append((sum(len(o.outputs[0].token_ids) for o in out), time.perf_counter() - t))
    json.dump(times, open(sys.argv[2], "w"))
"""


def config(model: Path, args: argparse.Namespace) -> Any:
    from forge_core.config import load_config

    return load_config(
        {
            "run": {"id": "generator"},
            "steps": 8,
            "max_staleness": 8,
            "model": str(model),
            "dataset": {"path": "python://benchmarks.shapes:prompts", "options": {"length": args.prompt}},
            "training": {
                "batch_size": args.groups * SAMPLES, "seq_len": args.prompt + args.tokens, "dtype": args.dtype,
            },
            "grpo": {"n_samples": SAMPLES, "beta": 0.0},
            "rollout": {"max_new_tokens": args.tokens},
            "rewards": {"functions": [{"path": "benchmarks.shapes:coin"}]},
            "generator": {
                "backend": "vllm", "dtype": args.dtype, "sampling_params": {"ignore_eos": True},
                "engine_args": {"max_num_seqs": args.groups * SAMPLES, **json.loads(args.engine_args)},
            },
            "services": {"trainer": {"with_gpus": False}},
            "eval": {"prompts": 0},
        }
    )  # fmt: skip


def ours(folder: Path, model: Path, args: argparse.Namespace) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """Tokens and seconds of each batch; what the raw engine is to be given."""
    from forge_core.runs.context import RunContext
    from forge_core.runs.initialise import initialise
    from forge_core.runs.planning import shard_count
    from forge_core.runs.record import create_run
    from forge_core.runs.stages import sample_shard, seconds_of
    from forge_core.store import open_store

    store = open_store(str(folder / "store"))
    ctx = RunContext(store, create_run(store, config(model, args)))
    initialise(ctx)
    ctx._generator = Shaped(ctx.generator(0), lambda seed: length(args, seed), serial=False)
    shards, times, batches = shard_count(ctx.config), [], []
    with ThreadPoolExecutor(shards) as pool:
        for batch in range(args.batches + 1):
            plan = ctx.plan(batch)
            started = time.perf_counter()
            done = list(pool.map(lambda shard, b=batch: sample_shard(ctx, b, shard), range(shards)))
            seconds = time.perf_counter() - started
            manifests = [store.open_published(ref.prefix).manifest.provenance for ref in done]
            times.append((sum(m["tokens"] for m in manifests), seconds))
            assert seconds_of(ctx, [ref.prefix for ref in done]) > 0
            batches.append(
                {
                    "prompts": [g["prompt_ids"] for g in plan["groups"] for _ in g["seeds"]],
                    "seeds": [s % 2**31 for g in plan["groups"] for s in g["seeds"]],
                    "lengths": [length(args, s) for g in plan["groups"] for s in g["seeds"]],
                }
            )
    difference = logprob_difference(ctx, done[0].prefix, model, args)
    generator = ctx.generator(0)
    engine_args = generator._settings.arguments(0, model)  # type: ignore[attr-defined]
    engine_args.pop("scheduling_policy")
    environment = {**os.environ, **generator._settings.variables(0)}  # type: ignore[attr-defined]
    found = {
        "vllm_config": generator.get_vllm_config(),  # type: ignore[attr-defined]
        "batches": batches,
        "engine_args": engine_args,
        "environment": {name: value for name, value in environment.items() if value is not None},
        "logprob_difference": difference,
    }
    ctx._generator = generator._engine  # type: ignore[attr-defined]
    ctx.close()
    return times, found


def logprob_difference(ctx: Any, prefix: str, model: Path, args: argparse.Namespace) -> float:
    """Between sampler and ``transformers``: the larger mean of two episodes. AssertionError unless all are whole."""
    import torch
    from transformers import AutoModelForCausalLM

    from forge_core.runs.episodes import read_episodes

    episodes = read_episodes(ctx.store, prefix)
    assert all(0 < len(e.response_ids) == len(e.response_logprobs) <= args.tokens for e in episodes)
    assert args.mean or all(len(e.response_ids) == args.tokens for e in episodes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    differences = []
    for episode in episodes[:2]:
        ids = torch.tensor([episode.prompt_ids + episode.response_ids], device=device)
        with torch.no_grad():
            logits = reference(ids).logits[0, len(episode.prompt_ids) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(episode.prompt_ids) :, None]).squeeze(1).cpu()
        differences.append((torch.tensor(episode.response_logprobs) - expected).abs().mean().item())
    return max(differences)


def raw(folder: Path, found: dict[str, Any], args: argparse.Namespace) -> dict[str, list[tuple[int, float]]]:
    variants = {"with_logprobs_and_seeds": {"logprobs": 0}, "with_flat_logprobs_and_seeds": FLAT, "plain": {}}
    params = {"ignore_eos": True, "temperature": 1.0, "detokenize": False}
    environment = found.pop("environment")
    start = {"engine_args": found["engine_args"], "variants": variants, "batches": found["batches"], "params": params}
    (folder / "raw.json").write_text(json.dumps(start))
    (folder / "raw.py").write_text(RAW)
    command = [sys.executable, folder / "raw.py", folder / "raw.json", folder / "times.json"]
    subprocess.run(command, check=True, env=environment)
    return json.loads((folder / "times.json").read_text())


def length(args: argparse.Namespace, seed: int) -> int:
    """Tokens of the response to the request with ``seed``."""
    if not args.mean:
        return args.tokens
    return max(1, min(round(random.Random(seed).expovariate(1 / args.mean)), args.tokens))


def speed(times: list[tuple[int, float]]) -> float:
    """Tokens a second, the median over all batches but the first, which warms up."""
    return median(tokens / seconds for tokens, seconds in times[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument(
        "--mean", type=int, default=0, help="of lengths drawn in advance (exponential); 0: all --tokens"
    )
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine-args", default="{}")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        model = random_model(folder / "model", args.shape, positions=4096, dtype=args.dtype)
        times, found = ours(folder, model, args)
        result = {
            "benchmark": "generator_gpu",
            **provenance(),
            "settings": {k: str(v) for k, v in vars(args).items()},
            "goal": {"ours_over_raw_at_least": 0.97},
            "logprob_difference": found["logprob_difference"],
            "tokens_per_second": {"ours": round(speed(times))},
            "batches": {"ours": times},
            "vllm": found["vllm_config"],
        }
        write("generator_gpu", result)  # whatever becomes of the raw engine
        limit = 1e-4 if args.dtype == "float32" else 0.05
        if not found["logprob_difference"] < limit:
            raise SystemExit(f"wrong: log-probabilities differ by {found['logprob_difference']}, allowed is {limit}")
        baseline = raw(folder, found, args)
    speeds = {"ours": speed(times), **{f"raw_{name}": speed(t) for name, t in baseline.items()}}
    compared = {
        "tokens_per_second": {k: round(v) for k, v in speeds.items()},
        "ours_over_raw": round(speeds["ours"] / max(speeds[f"raw_{name}"] for name in baseline if name != "plain"), 4),
        "ours_over_plain_raw": round(speeds["ours"] / speeds["raw_plain"], 4),
        "batches": {"ours": times, **baseline},
    }
    write("generator_gpu", {**result, **compared})


if __name__ == "__main__":
    main()

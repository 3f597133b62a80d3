"""The trainer's whole optimizer step on one GPU, and a bare torchtitan loop beside it in the same run.

    OUT=results .venv/bin/python -m benchmarks.trainer_gpu                      # Qwen3-0.6B shape, random weights
    .venv/bin/python -m benchmarks.trainer_gpu --settings compile --data uniform --no-check     # the fastest, alone
    .venv/bin/python -m benchmarks.trainer_gpu --device cpu --shape tiny        # what a machine without a GPU can run

First, correctness on a small model with packed documents of mixed lengths: log-probabilities against transformers, and
losses and gradient norms of three GRPO steps against the float32 CPU trainer; the reference model's log-probabilities
must equal the trainer's (on a CPU bit for bit, on a GPU up to the last bits); the head's gradients are compared with
float64. What is wrong is listed in the JSON, which is written after every row, and the exit status is 1.

Then time: ``train_samples`` with the GRPO loss, beta > 0 and given reference log-probabilities, AdamW and clipping;
16,384 tokens a step. ``uniform``: documents of 2,048 tokens, all of them trained on; ``mixed``: documents of 200 to
2,048 tokens, the second half of each trained on. MFU counts 6 N + 6 L d_attention T floating-point operations a token
(causal attention over documents of T tokens), without recomputation, over the card's dense bfloat16 peak.
A profile of one step of each setting goes to trainer_gpu_profiles.txt beside the JSON.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bare_titan import bare_step
from benchmarks.machine import RESULTS, provenance, write
from forge_core.algorithms.losses.grpo import GRPOLoss
from forge_core.algorithms.ops import Totals
from forge_core.reference.model import ReferenceModel
from forge_core.runs.gpu_speed import peak_flops
from forge_core.training import logprob_kernels
from forge_core.training.architecture import Architecture, read_architecture
from forge_core.training.packing import Sample
from forge_core.training.settings import TrainerSettings
from forge_core.training.trainer import TitanTrainer

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "small": {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "tiny": {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
SETTINGS = {  # name -> (compile, activation checkpointing)
    "eager": (False, "none"),
    "compile": (True, "none"),
    "compile-selective": (True, "selective"),
    "compile-full": (True, "full"),
}
# Trainer and reference run the same code on the same weights; yet the matrix products of a GPU need not add in the same
# order for tensors that lie elsewhere. float32: four units in the last place of a log-probability above 8. bfloat16:
# one of a logit above 4.
LAST_BITS = {"float32": 4e-6, "bfloat16": 0.04}
LOSS = {"beta": 0.1, "agg_type": "token_mean"}


def saved_model(shape: str, folder: Path, device: str, *, tied: bool = True) -> Path:
    """A Qwen3 model of ``shape`` with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=tied, max_position_embeddings=4096)
    with torch.device(device):
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / shape)
    return folder / shape


def documents(lengths: list[int], vocab: int, prompt_share: float) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)

    def one(length: int) -> Sample:
        prompt = max(int(length * prompt_share), 1)
        tokens = torch.randint(0, vocab, (length,), generator=generator).tolist()
        noise = torch.randn(length, generator=generator)
        mask = [False] * prompt + [True] * (length - prompt)
        return Sample(tokens, mask, noise.tolist(), [-7.0] * length, [-7.0] * length)

    return [one(length) for length in lengths]


def data_sets(tokens: int, longest: int, vocab: int) -> dict[str, list[Sample]]:
    generator, mixed = torch.Generator().manual_seed(2), []
    while sum(mixed) < tokens:
        mixed.append(int(torch.randint(longest // 10, longest + 1, (1,), generator=generator)))
    mixed[-1] -= sum(mixed) - tokens
    mixed = [n for n in mixed if n >= 8]
    return {
        "uniform": documents([longest] * (tokens // longest), vocab, 0.0),
        "mixed": documents(mixed, vocab, 0.5),
    }


def totals_of(samples: list[Sample]) -> Totals:
    return Totals(sum(int(sum(s.loss_mask)) for s in samples), len(samples))


def trainer_of(folder: Path, device: str, **settings: Any) -> TitanTrainer:
    trainer = TitanTrainer(folder, TrainerSettings(**settings), GRPOLoss(**LOSS), device=device)  # type: ignore[arg-type]
    trainer.setup()
    return trainer


def anchored(samples: list[Sample], trainer: TitanTrainer) -> list[Sample]:
    """The samples with their own log-probabilities as the sampler's and the reference's, so that ratios are 1."""
    made = []
    for sample, found in zip(samples, trainer.logprobs_samples(samples, temperature=1.0), strict=True):
        values = iter(found)
        own = [next(values) if counts else 0.0 for counts in sample.loss_mask]
        made.append(replace(sample, generator_logprobs=own, ref_logprobs=own).in_arrays())  # as a run has them
    return made


def largest_gap(a: list[list[float]], b: list[list[float]]) -> float:
    return max(abs(x - y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True))


def check(folder: Path, device: str, compiled: bool) -> tuple[dict[str, float], list[str]]:
    """Differences on the small model, and those that are too large."""
    longest, budget = 300, 1024
    samples = documents([300, 17, 211, 130, 64, 299, 5, 77, 250, 190, 33], 97, 0.3)
    common: dict[str, Any] = {"learning_rate": 1e-3, "seq_len": longest, "token_budget": budget}
    cpu = trainer_of(folder, "cpu", **common)
    exact = cpu.logprobs_samples(samples, temperature=0.9)
    found = {"transformers": largest_gap(exact, _transformers_logprobs(folder, samples, 0.9))}
    samples = anchored(samples, cpu)
    steps = [_three_steps(cpu, samples)]
    limits = {"transformers": 1e-3}
    for dtype, limit in (("float32", 2e-3), ("bfloat16", 0.1)):
        trainer = trainer_of(folder, device, dtype=dtype, compile=compiled, **common)
        own = trainer.logprobs_samples(samples, temperature=0.9)
        found[f"{dtype}/logprobs"], limits[f"{dtype}/logprobs"] = largest_gap(own, exact), limit
        found[f"{dtype}/reference"] = largest_gap(own, _reference_logprobs(folder, samples, device, dtype, compiled))
        limits[f"{dtype}/reference"] = 0.0 if device == "cpu" else LAST_BITS[dtype]
        steps = [steps[0], _three_steps(trainer, samples)]
        for name, place in (("loss", 0), ("norm", 1)):
            gaps = [abs(x[place] - y[place]) / (abs(x[1]) if place else 1.0) for x, y in zip(*steps, strict=True)]
            found[f"{dtype}/{name}"], limits[f"{dtype}/{name}"] = max(gaps), limit
        trainer.cleanup()
    found |= (heads := head_errors(torch.device(device)))
    limits |= dict.fromkeys(heads, 0.02)
    wrong = [f"{name} is {value}, allowed {limits[name]}" for name, value in found.items() if not value <= limits[name]]
    return found, wrong


def head_errors(device: torch.device) -> dict[str, float]:
    """Relative errors of the head's gradients in bfloat16, with the logits kept and computed again."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).to(torch.bfloat16) for n in (700, 1003))
    target, mix = torch.randint(0, 1003, (700,), generator=generator), torch.randn(2, 700, generator=generator)
    errors, fits, chunk = {}, logprob_kernels._fits, logprob_kernels._CHUNK
    exact = _head_gradients(_plain_head, hidden.double(), weight.double(), target, mix)
    for name, kept in (("kept", True), ("again", False)):
        logprob_kernels._fits, logprob_kernels._CHUNK = (lambda *_, kept=kept: kept), 1003 * 256
        there = [x.to(device) for x in (hidden, weight, target, mix)]
        found = _head_gradients(logprob_kernels.FusedTargetLogprobs.apply, *there)
        for part, ours, theirs in zip(("hidden", "weight"), found, exact, strict=True):
            errors[f"head/{name}/{part}"] = float((ours.cpu().double() - theirs).norm() / theirs.norm())
    logprob_kernels._fits, logprob_kernels._CHUNK = fits, chunk
    return errors


def _plain_head(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float, _: None
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return logprobs.gather(1, target[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(1)


def _head_gradients(
    head: Callable[..., Any], hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, mix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = head(hidden, weight, target, 8.0, None)
    (mix[0] * logprobs + mix[1] * entropy).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad, weight.grad


def _three_steps(trainer: TitanTrainer, samples: list[Sample]) -> list[tuple[float, float]]:
    done = [trainer.train_samples(samples, totals=totals_of(samples), temperature=0.9) for _ in range(3)]
    return [(result.loss, step.grad_norm) for result, step in done]


@torch.no_grad()
def _transformers_logprobs(folder: Path, samples: list[Sample], temperature: float) -> list[list[float]]:
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for sample in samples:
        tokens = torch.tensor(sample.tokens)
        logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1] / temperature, -1)
        chosen = logprobs.gather(1, tokens[1:, None]).squeeze(1)
        found.append(chosen[torch.tensor(sample.loss_mask[1:])].tolist())
    return found


def _reference_logprobs(
    folder: Path, samples: list[Sample], device: str, dtype: str, compiled: bool
) -> list[list[float]]:
    model = ReferenceModel(folder, token_budget=1024, seq_len=300, dtype=dtype, device=device, compile=compiled)
    model.setup()
    rows = [(list(map(int, s.tokens)), list(s.loss_mask).index(True)) for s in samples]  # of lists or arrays
    return model.forward([(tokens[:prompt], tokens[prompt:]) for tokens, prompt in rows], 0.9)


def timed(step: Callable[[], Any], device: torch.device, warmups: int, steps: int) -> dict[str, float]:
    """Median seconds of a step, the first step's seconds (compilation included), and the peak of memory."""
    started = time.perf_counter()
    step()
    first = time.perf_counter() - started
    for _ in range(warmups):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        _synchronize(device)
        started = time.perf_counter()
        step()
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "step_s": round(median(seconds), 5),
        "spread_s": round(max(seconds) - min(seconds), 5),
        "first_step_s": round(first, 2),
        "peak_gib": round(peak, 2),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rates(found: dict[str, float], arch: Architecture, samples: list[Sample], device: torch.device) -> dict[str, float]:
    lengths = [len(s.tokens) for s in samples]
    per_layer = arch.dim * arch.head_dim * (2 * arch.n_heads + 2 * arch.n_kv_heads) + 3 * arch.dim * arch.hidden_dim
    weights = arch.vocab_size * arch.dim + arch.n_layers * per_layer
    attention = 6 * arch.n_layers * arch.n_heads * arch.head_dim * sum(n * n for n in lengths)
    rate = sum(lengths) / found["step_s"]
    peak = peak_flops(str(device))
    done = {**found, "tokens_per_s": round(rate)}
    if peak:
        done["mfu"] = round((6 * weights * sum(lengths) + attention) / found["step_s"] / peak, 4)
    return done


def profile(step: Callable[[], Any], title: str) -> str:
    """The kernels that took longest in one step, how long the GPU was busy, and what came after its longest pauses."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profiler(activities=activities) as found:
        started = time.perf_counter()
        step()
        wall = time.perf_counter() - started
    events = found.key_averages()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    kernels = [e for e in events if _on_gpu(e)]
    busy = sum(e.self_device_time_total for e in kernels) / 1e6
    lines = [f"{e.self_device_time_total / 1e3:9.3f} ms {e.count:6d} x  {e.key[:150]}" for e in _slowest(kernels)]
    table = events.table(sort_by=key, row_limit=25, max_name_column_width=80)
    heading = f"=== {title}: wall {wall:.4f} s (profiled), kernels {busy:.4f} s"
    return "\n".join([heading, *_pauses(found.events()), *lines, "", table, ""])


def _on_gpu(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA") and not event.is_user_annotation


def _pauses(events: Iterable[Any]) -> list[str]:
    """The longest times that the GPU waited within a step: when (from the first event), how long, and what ended it."""
    events = sorted(events, key=lambda e: e.time_range.start)
    begun = events[0].time_range.start
    until, found = begun, []
    for event in filter(_on_gpu, events):
        found.append((event.time_range.start - until, until - begun, event.key))
        until = max(until, event.time_range.end)
    idle = sum(pause for pause, _, _ in found if pause > 0)
    longest = [
        f"  idle {pause / 1e3:7.3f} ms at {at / 1e3:8.2f} ms, then {key[:90]}"
        for pause, at, key in sorted(found)[:-13:-1]
    ]
    return [f"  idle {idle / 1e3:.2f} ms before the last kernel", *longest]


def _slowest(kernels: list[Any]) -> list[Any]:
    return sorted(kernels, key=lambda e: -e.self_device_time_total)[:40]


def measure(options: argparse.Namespace, folder: Path, out: Path) -> Iterator[dict[str, Any]]:
    device, arch = torch.device(options.device), read_architecture(folder)
    (out / "trainer_gpu_profiles.txt").unlink(missing_ok=True)
    for data, samples in data_sets(options.tokens, options.length, arch.vocab_size).items():
        if data not in options.data.split(","):
            continue
        for name in options.settings.split(","):
            compiled, checkpointing = SETTINGS[name]
            for side in ("bare", "forge") if options.bare and device.type == "cuda" else ("forge",):
                torch._dynamo.reset()  # two models in a process make code for all shapes of the second
                step = _step_of(side, options, folder, arch, samples, compiled, checkpointing)
                found = rates(timed(step, device, options.warmups, options.steps), arch, samples, device)
                yield {"data": data, "setting": name, "side": side, **found}
                with (out / "trainer_gpu_profiles.txt").open("a") as file:
                    file.write(profile(step, f"{data} {name} {side}"))
                del step
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def _step_of(
    side: str,
    options: argparse.Namespace,
    folder: Path,
    arch: Architecture,
    samples: list[Sample],
    compiled: bool,
    checkpointing: str,
) -> Callable[[], Any]:
    if side == "bare":
        device = torch.device(options.device)
        return bare_step(arch, samples, options.tokens, device, compiled=compiled, checkpointing=checkpointing)
    trainer = trainer_of(
        folder,
        options.device,
        dtype="bfloat16",
        compile=compiled,
        activation_checkpointing=checkpointing,
        seq_len=options.length,
        token_budget=options.tokens,
    )
    samples = anchored(samples, trainer)
    totals = totals_of(samples)
    return lambda: trainer.train_samples(samples, totals=totals, temperature=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--shape", default="0.6b", choices=SHAPES, help="shape of the timed model")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens a step: one micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest document")
    parser.add_argument("--settings", default="eager,compile,compile-selective", help=", ".join(SETTINGS))
    parser.add_argument("--data", default="uniform,mixed", help="uniform, mixed")
    parser.add_argument("--warmups", type=int, default=3, help="untimed steps after the first")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument(
        "--no-bare",
        dest="bare",
        action="store_false",
        help="leave the bare torchtitan loop out (a CPU always does: flex attention has no backward pass there)",
    )
    parser.add_argument("--no-check", dest="check", action="store_false", help="leave the correctness part out")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", RESULTS))
    result: dict[str, Any] = {"machine": provenance(), "options": vars(options)}
    if options.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.check:
            small = saved_model("tiny" if options.device == "cpu" else "small", folder, "cpu")
            result["differences"], result["wrong"] = {}, []
            for compiled in sorted({SETTINGS[name][0] for name in options.settings.split(",")}):
                found, wrong = check(small, options.device, compiled)
                result["differences"]["compile" if compiled else "eager"] = found
                result["wrong"] += wrong
            write("trainer_gpu", result)
        result["rows"] = []
        for row in measure(options, saved_model(options.shape, folder, options.device), out):
            result["rows"].append(row)
            write("trainer_gpu", result)
    if result.get("wrong"):
        raise SystemExit(f"wrong results: {result['wrong']}")


if __name__ == "__main__":
    main()

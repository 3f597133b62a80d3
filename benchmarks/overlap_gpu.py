"""How well does generation overlap training? Step times at S = 0, 1, 2 and 4 against ``max(W, T, (G + T) / (S + 1))``.

    python -m benchmarks.overlap_gpu                      (two GPUs: one for vLLM, one for the trainer)
    python -m benchmarks.overlap_gpu --shape 3M --dtype float32 --threads 1 --groups 4      (no GPU: a core for each)
    python -m benchmarks.overlap_gpu --kinds fixed --staleness 1 --groups 64   (one GPU, which both share: what a step
                                                                               of ten seconds takes beside its work)

W: engine-seconds of a batch at full load; T: seconds of a training step, publishing included; G: seconds of the
longest response under load. The formula takes generator and trainer to be apart: on a GPU of both it means little.
Real flow, Prefect server, store, engine and trainer. A run whose episodes are older than S, or whose log-probabilities
are not the trainer's, is an error. Lengths are drawn in advance and EOS is ignored: once all equal,
once long-tailed (log-normal with median 2,048 and mean 3,072, at most 16,384, divided by --scale so that a measurement
takes minutes). "serial" is S = 2 on the long tail with an engine that serves one rollout task at a time.

A batch waits for the one S + 1 before it, so batches come in turns of S + 1; a run is measured over whole turns,
between the one that fills the window and the one in which nothing is generated any more.

W is measured apart, before the runs: the tokens of a batch over the tokens a second of the same engine with all slots
taken (as many as the largest S can fill). T is the ledger's, over all runs of a kind. G is measured in each run, under
its own load: the longest call of a batch, in the mean over the batches that wait for each other. It grows with S, since
more batches share the engine; where it decides, the ratio to the formula says what a turn takes beside G and T.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.checks import wrong
from benchmarks.machine import provenance, write
from benchmarks.shapes import random_model
from benchmarks.smollm2_gpu import rates

SAMPLES = 8
KINDS = ("fixed", "long_tail", "serial")
GOALS = {"over_formula_at_most": 1.10, "orchestration_share_at_most_at_10_s": 0.02}


def long_tail(scale: int) -> Callable[[int], int]:
    """Response length as a function of the request's seed."""
    sigma = math.sqrt(2 * math.log(1.5))  # mean / median = exp(sigma^2 / 2)

    def length(seed: int) -> int:
        drawn = random.Random(seed).lognormvariate(math.log(2048 / scale), sigma)
        return max(1, min(round(drawn), 16384 // scale))

    return length


class Shaped:
    """The run's own engine, with a length for each request and a record of when it worked."""

    def __init__(self, engine: Any, length: Callable[[int], int], serial: bool) -> None:
        self._engine, self._length = engine, length
        self._lock = threading.Lock() if serial else None
        self.calls: list[tuple[int, float, float]] = []  # batch, begin and end
        self.swaps: list[dict[str, float]] = []  # seconds of each phase, and of all

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[Any], **options: Any) -> Any:
        shaped = [
            dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_new_tokens=self._length(r.seed)))
            for r in requests
        ]
        if self._lock:
            with self._lock:
                return self._timed(shaped, options)
        return self._timed(shaped, options)

    def update_weights(self, version: int) -> None:
        started = time.monotonic()
        self._engine.update_weights(version)
        self.swaps.append({**self._engine.last_update, "all": time.monotonic() - started})

    def _timed(self, requests: Sequence[Any], options: dict[str, Any]) -> Any:
        started = time.time()
        try:
            return self._engine.generate(requests, **options)
        finally:
            self.calls.append((int(requests[0].request_id.split("/")[-3]), started, time.time()))

    def shutdown(self) -> None:
        """The engine serves the next run too."""


def serve_another_run(engine: Any, weights: Callable[[int], Path], version: int) -> None:
    """Loading an engine takes a minute: this one goes back to the first version of the next run instead."""
    pool = engine._pool
    pool.weights, pool.version = weights, version - 1
    for replica in pool.live().values():
        replica.version = version - 1
    engine.update_weights(version)


def config(args: argparse.Namespace, model: Path, store: Path, name: str, staleness: int, steps: int) -> Any:
    from forge_core.config import load_config

    longest = 16384 // args.scale
    return load_config(
        {
            "run": {"id": name},
            "store": str(store),
            "steps": steps,
            "max_staleness": staleness,
            "model": str(model),
            "dataset": {"path": "python://benchmarks.shapes:prompts", "options": {"length": 64}},
            "training": {
                "batch_size": args.groups * SAMPLES, "seq_len": 64 + longest, "dtype": args.dtype,
                "learning_rate": 1e-6, "token_budget": max(16384, 64 + longest), "epochs_per_batch": args.epochs,
                "threads": args.threads,
            },
            "grpo": {"n_samples": SAMPLES, "beta": 0.0},
            "rollout": {"max_new_tokens": longest},
            "rewards": {"functions": [{"path": "benchmarks.shapes:coin"}]},
            "generator": {
                "backend": "vllm", "dtype": args.dtype, "sampling_params": {"ignore_eos": True},
                "engine_args": {"max_num_seqs": args.slots}, "sharing": "split", "threads": args.threads,
            },
            "eval": {"prompts": 0},
            "checkpoint": {"interval": 0},
        }
    )  # fmt: skip


def union(intervals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds of ``[start, end]`` that some interval covers."""
    covered, at = 0.0, start
    for a, b in sorted(intervals):
        a, b = max(a, at), min(b, end)
        if b > a:
            covered, at = covered + b - a, b
    return covered


def run(args: argparse.Namespace, engines: dict[str, Any], name: str, staleness: int, steps: int, length: Any) -> dict:
    """One run through the flow; what its steady state took."""
    from flows.grpo import grpo
    from forge_core.runs import context
    from forge_core.store import Ledger, open_store

    store = Path(args.work) / f"store-{name}"
    model = random_model(Path(args.work) / "model", args.shape, positions=40960 // args.scale + 1024, dtype=args.dtype)
    shaped: list[Shaped] = []

    def build(ctx: Any, version: int) -> Shaped:
        if "vllm" not in engines:
            engines["vllm"] = original(ctx, version)
        else:
            serve_another_run(engines["vllm"], ctx.weights_dir, version)
        shaped.append(Shaped(engines["vllm"], length, name.startswith("serial")))
        return shaped[-1]

    original = engines.setdefault("build", context.build_generator)
    context.build_generator = build  # type: ignore[assignment]
    state = grpo(config(args, model, store, name, staleness, steps), return_state=True)
    assert state.is_completed(), state
    opened = open_store(str(store))
    entries = Ledger(opened, name).entries()
    if problems := wrong(entries, staleness, args.dtype):
        raise AssertionError(f"{name} is wrong: {problems[:5]}")
    found = figures(entries, shaped[0].calls, staleness) if turns_of(len(entries), staleness) > 0 else {}
    swaps, found["orchestration"] = shaped[0].swaps, orchestration(store, name)
    return {**found, "swap_s": {k: median(s[k] for s in swaps) for k in swaps[0]} if swaps else {}}


def orchestration(store: Path, name: str) -> dict[str, float]:
    """Medians of ``orchestration/*``: what is neither training nor publishing, and not waiting for episodes."""
    found = rates(name, {**os.environ, "FORGE_STORE": str(store)})
    return {key: value for key, value in found.items() if key.startswith("orchestration/")}


def full_load(engine: Any, slots: int, length: int) -> float:
    """Tokens a second of the engine with ``slots`` responses of ``length`` tokens at once."""
    from forge_core.data_model import GenerationRequest, SamplingParams

    sampling = SamplingParams(max_new_tokens=length)
    prompts = [tuple(2 + (7 * n + i) % 40 for i in range(64)) for n in range(slots)]
    requests = [GenerationRequest(f"full/0/{n}/0", prompt, n, sampling) for n, prompt in enumerate(prompts)]
    started = time.monotonic()
    completions = engine.generate(requests)
    return sum(len(c.token_ids) for c in completions) / (time.monotonic() - started)


def runs_of(kinds: Sequence[str], staleness: Sequence[int]) -> list[tuple[str, int]]:
    """Name and staleness of each run."""
    return [(f"{kind}-{s}", s) for kind in kinds for s in ([2] if kind == "serial" else staleness)]


def steps_of(measured: int, staleness: int) -> int:
    """Steps of a run in which at least ``measured`` are measured, in whole turns."""
    turn = staleness + 1
    return turn + -(-measured // turn) * turn + staleness


def turns_of(steps: int, staleness: int) -> int:
    """Whole turns of a run of ``steps`` that are measured."""
    return (steps - 1 - 2 * staleness) // (staleness + 1)


def chained(calls: Sequence[tuple[int, float]], staleness: int) -> float:
    """Seconds of a batch's longest call: the mean over batches that wait for each other, of the slowest such chain.
    ``calls``: batch and seconds of each."""
    longest: dict[int, float] = {}
    for batch, seconds in calls:
        longest[batch] = max(seconds, longest.get(batch, 0.0))
    chains = [[s for b, s in longest.items() if b % (staleness + 1) == r] for r in range(staleness + 1)]
    return max(fmean(chain) for chain in chains if chain)


def figures(entries: list[dict[str, Any]], calls: list[tuple[int, float, float]], staleness: int) -> dict:
    from datetime import datetime

    ends = [datetime.fromisoformat(e["finished_at"]).timestamp() for e in entries]
    first, count = staleness, turns_of(len(entries), staleness) * (staleness + 1)
    last = first + count
    span = (ends[first], ends[last])
    busy = [e["metrics"]["time/train"] + e["metrics"]["time/publish"] for e in entries]
    trained = [(end - took, end) for end, took in zip(ends, busy, strict=True)]
    seconds, intervals = span[1] - span[0], [(a, b) for _, a, b in calls]
    return {
        "staleness": staleness,
        "step_s": seconds / count,
        "steps": count,
        "train_s": median(e["metrics"]["time/train"] for e in entries[1:]),
        "publish_s": median(e["metrics"]["time/publish"] for e in entries[1:]),
        "trainer_idle": 1 - union(trained, *span) / seconds,
        "generator_idle": 1 - union(intervals, *span) / seconds,
        "neither": 1 - union([*intervals, *trained], *span) / seconds,
        "tokens": median(e["tokens"] for e in entries),
        "longest_call_s": chained([(n, b - a) for n, a, b in calls if first < n <= last], staleness),
        "ends": [round(end - ends[0], 3) for end in ends],
        "times": [{k: round(v, 3) for k, v in e["metrics"].items() if k.startswith("time/")} for e in entries],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--slots", type=int, help="of the engine; left out: enough for the largest staleness")
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="to measure, at least, in each run")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="in this order")
    parser.add_argument("--threads", type=int, help="of the generator and of the trainer, on a CPU")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    args.slots = args.slots or (max(args.staleness) + 1) * args.groups * SAMPLES
    from flows.server import ensure_server

    engines: dict[str, Any] = {}
    mean = 3072 // args.scale
    lengths = {"fixed": lambda seed: mean, "long_tail": long_tail(args.scale)}
    runs: dict[str, dict] = {}
    failed: dict[str, str] = {}
    result = {"benchmark": "overlap_gpu", **provenance()}
    server = ensure_server()
    try:
        with tempfile.TemporaryDirectory(dir=args.folder) as args.work:
            os.chdir(args.work)  # where each run leaves its curve
            run(args, engines, "warm-up", 1, 2, lambda seed: 64)
            rate = full_load(engines["vllm"], args.slots, mean)
            wanted = runs_of(args.kinds, args.staleness)
            for name, s in wanted:
                length = lengths["fixed" if name.startswith("fixed") else "long_tail"]
                try:
                    runs[name] = run(args, engines, name, s, steps_of(args.steps, s), length)
                except Exception as error:  # what was measured stays, and the next run may go well
                    failed[name] = f"{type(error).__name__}: {error}"
                not_run = [other for other, _ in wanted if other not in {**runs, **failed}]
                found = compared(runs, lengths, args, rate)
                write("overlap_gpu", {**result, **found, "failed": failed, "not_run": not_run})
            engines["vllm"].shutdown()
    finally:
        server.stop()
    if failed:
        raise SystemExit(f"failed: {failed}")


def compared(runs: dict[str, dict], lengths: dict[str, Any], args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Each run's step time over the formula's. ``rate``: tokens a second at full load."""
    for kind in lengths:
        mine = {s: runs[name] for s in args.staleness if "train_s" in runs.get(name := f"{kind}-{s}", {})}
        if not mine:
            continue
        train = median(r["train_s"] + r["publish_s"] for r in mine.values())
        work = median(r["tokens"] for r in mine.values()) / rate
        for s, r in mine.items():
            longest = r["longest_call_s"]
            r["formula_s"] = max(work, train, (longest + train) / (s + 1))
            r["over_formula"] = round(r["step_s"] / r["formula_s"], 3)
            r |= {"W": work, "T": train, "G": longest}
    settings = {k: str(v) for k, v in vars(args).items() if k != "work"}
    return {"settings": settings, "goal": GOALS, "tokens_per_second_at_full_load": round(rate, 1), "runs": runs}


if __name__ == "__main__":
    main()

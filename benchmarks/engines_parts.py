"""The parts of ``engines_gpu.py``, each run as ``python -m benchmarks.engines_parts PART DEVICE SHAPE ANSWER``."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import random_model
from benchmarks.trainer_gpu import LOSS, documents, saved_model, totals_of

CPU, GIB = "cpu", 1024**3
PROMPT, RESPONSE = 64, 64


class Skipped(Exception):
    """The part cannot be run here; says why."""


@dataclass
class Part:
    """``wrong``: what does not hold; ``figures``: what was measured on the way, which is in the file ``answer`` at
    once, should the part not come to its end."""

    device: str
    shape: str
    folder: Path
    answer: Path
    figures: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def close(self) -> float:
        """Mean difference of log-probabilities of two engines, in nats: of sampled and of arbitrary tokens."""
        return 0.1 if self.on_gpu else 1e-4

    def used(self) -> int:
        """Bytes of the first visible GPU that any process has."""
        if not self.on_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def model(self) -> Path:
        return random_model(self.folder / "model", self.shape, positions=4096, dtype=self.dtype)

    def at_most(self, name: str, found: float, limit: float) -> None:
        self.figures[name] = round(found, 7)
        if not found <= limit:
            self.wrong.append(f"{name} is {found:.4g}, allowed is {limit:.4g}")
        self.note()

    def holds(self, name: str, found: bool) -> None:
        if not found:
            self.wrong.append(name)
            self.note()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.figures.setdefault(f"{name}_s", []).append(round(time.monotonic() - started, 3))
        self.note()

    def note(self, **status: str) -> None:
        self.answer.write_text(json.dumps({**status, "wrong": self.wrong, "figures": self.figures}))


def run_config(part: Part, **changes: Any) -> Any:
    from forge_core.config import load_config

    return load_config({**run_settings(part), **changes})


def run_settings(part: Part) -> dict[str, Any]:
    return {
        "run": {"id": "part"},
        "steps": 8,
        "model": str(part.model()),
        "dataset": {"path": "python://benchmarks.shapes:prompts", "options": {"length": PROMPT}},
        "training": {
            "batch_size": 32, "seq_len": PROMPT + RESPONSE, "token_budget": 32 * (PROMPT + RESPONSE),
            "dtype": part.dtype, "learning_rate": 1e-4,
        },
        "grpo": {"n_samples": 8, "beta": 0.0},
        "rollout": {"max_new_tokens": RESPONSE, "shards": 1},
        "rewards": {"functions": [{"path": "benchmarks.shapes:coin"}]},
        "generator": {
            "backend": "vllm", "dtype": part.dtype, "sampling_params": {"ignore_eos": True}, "sharing": "sleep",
            "engine_args": {"max_num_seqs": 32},
        },
        "eval": {"prompts": 0},
        "checkpoint": {"interval": 0},
    }  # fmt: skip


def new_context(part: Part, **changes: Any) -> Any:
    from forge_core.runs.context import RunContext
    from forge_core.runs.initialise import initialise
    from forge_core.runs.record import create_run
    from forge_core.store import open_store

    store = open_store(str(part.folder / "store"))
    ctx = RunContext(store, create_run(store, run_config(part, **changes)))
    initialise(ctx)
    return ctx


def mean_gap(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


# sleep ---------------------------------------------------------------------------------------------------------------


def sleep(part: Part) -> None:
    """A whole run of four steps in which generator and trainer take turns on one GPU (on a CPU both just work)."""
    turns_taken(part, own_process=False)


def sleep_apart(part: Part) -> None:
    """The same with a trainer in a process of its own, which has to give its memory back too."""
    turns_taken(part, own_process=True)


def turns_taken(part: Part, *, own_process: bool) -> None:
    from forge_core.runs.engines import takes_turns
    from forge_core.runs.stages import sample_shard, score_shard
    from forge_core.runs.training import train_batch
    from forge_core.training.packing import Sample

    ctx = new_context(part, training=run_settings(part)["training"] | {"own_process": own_process})
    part.holds("the generator sleeps while the trainer works", takes_turns(ctx) or not part.on_gpu)
    tokens = list(ctx.encode(ctx.prompts[1]))
    sample = Sample(tokens, [False] + [True] * (len(tokens) - 1), [0.0] * len(tokens))
    free: dict[str, list[float]] = {"asleep": [], "awake": []}

    def by_trainer() -> list[float]:
        note_free(part, free["asleep"])
        return ctx.trainer._loaded().logprobs_samples([sample], temperature=1.0)[0]

    try:
        for batch in range(4):
            with part.timed("generate"):
                episodes = sample_shard(ctx, batch, 0)
            score_shard(ctx, episodes)
            with part.timed("train"):
                entry = train_batch(ctx, batch)
            gap = entry["metrics"]["mismatch/one_version_mean_abs_logprob"]
            part.at_most(f"mismatch_of_step_{batch}", gap, part.close)
            ours = ctx.trainer._call(by_trainer)
            with part.timed("wake_and_update"), ctx.sampling(batch + 1) as engine:
                note_free(part, free["awake"])
                theirs = engine.score(tokens)
            part.at_most(f"after_update_{batch + 1}", mean_gap(ours, theirs), part.close)
    finally:
        ctx.close()
    part.figures["free_gib"] = free
    if part.on_gpu:
        given = min(free["asleep"]) - max(free["awake"])
        part.holds(f"sleeping gives memory back: {given:.1f} GiB", given > 0.2 * total_gib())


def note_free(part: Part, into: list[float]) -> None:
    if part.on_gpu:
        into.append(round(torch.cuda.mem_get_info()[0] / GIB, 2))


def total_gib() -> float:
    return torch.cuda.mem_get_info()[1] / GIB


# vllm_tp -------------------------------------------------------------------------------------------------------------


def vllm_tp(part: Part) -> None:
    """Greedy on two GPUs: what was chosen is (nearly) the likeliest token for transformers, for both versions."""
    from forge_core.data_model import GenerationRequest, SamplingParams
    from forge_core.devices import visible_gpus
    from forge_core.generation.vllm import VLLMGenerator
    from forge_core.generation.vllm_settings import VLLMSettings

    folders = [part.model(), shaken(part.model(), part.folder / "next")]
    publish_probe(part, folders[1])
    gpus = (tuple(visible_gpus()[:2]),) if part.on_gpu else ((),)
    settings = VLLMSettings(gpus=gpus, dtype=part.dtype, max_model_len=512, engine_args={"max_num_seqs": 16})
    sampling = SamplingParams(temperature=0.0, max_new_tokens=48)
    requests = [GenerationRequest(f"greedy/{i}", tuple(range(3 + i, 40 + 2 * i)), i, sampling) for i in range(8)]
    with part.timed("start"):
        generator = VLLMGenerator(folders.__getitem__, version=0, settings=settings, logs=part.folder)
    try:
        for version in range(2):
            with part.timed("update"):
                generator.update_weights(version)
            with part.timed("generate"):
                done = generator.generate(requests)
            compare_greedy(part, version, folders[version], done)
        part.figures["update_phases"] = generator.last_update
        found = generator.get_vllm_config()["parallel"]["tensor_parallel_size"]
        part.holds(f"tensor_parallel_size is {found}", found == max(len(gpus[0]), 1))
    finally:
        generator.shutdown()


def compare_greedy(part: Part, version: int, folder: Path, done: list[Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(part.device)
    behind, gaps, equal, count = [], [], 0, 0
    for completion in done:
        prompt, tokens = completion.metadata["prompt_ids"], completion.token_ids
        ids = torch.tensor([prompt + tokens], device=part.device)
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float(), -1)
        chosen_T = logprobs_TV.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        best_T = logprobs_TV.amax(1)
        behind.append(float((best_T - chosen_T).max()))
        gaps.append(mean_gap(chosen_T.tolist(), completion.logprobs))
        equal, count = equal + int((best_T == chosen_T).sum()), count + len(tokens)
    part.figures[f"version_{version}_share_equal"] = round(equal / count, 4)
    part.at_most(f"version_{version}_behind_the_likeliest", max(behind), 2 * part.close)
    part.at_most(f"version_{version}_logprobs", max(gaps), part.close)


def shaken(folder: Path, target: Path) -> Path:
    """Another version of a model: every matrix a little different."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: t if t.ndim == 1 else (t.float() + 0.01 * torch.randn(t.shape, generator=generator)).to(t.dtype)
        for name, t in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def publish_probe(part: Part, folder: Path) -> None:
    """What transformers computes with ``folder``, where the engine looks for the trainer's numbers."""
    from transformers import AutoModelForCausalLM

    from forge_core.models import probe

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(part.device)
    ids_BT = torch.tensor(probe.sequences(model.config.vocab_size, 512))
    with torch.no_grad():
        logprobs_BTV = torch.log_softmax(model(ids_BT.to(part.device)).logits[:, :-1].float(), -1).cpu()
    found = logprobs_BTV.gather(2, ids_BT[:, 1:, None]).squeeze(2).tolist()
    probe.write(folder, ids_BT.tolist(), found, part.dtype)


# ranks and float8 ---------------------------------------------------------------------------------------------------


def small_model(part: Part, *, tied: bool = True) -> tuple[Any, list[Any]]:
    """A store with a small model in it, and documents to train on."""
    from benchmarks.trainer_gpu import SHAPES
    from forge_core.store import folder_files, open_store

    shape = "small" if part.on_gpu else "tiny"
    folder = saved_model(shape, part.folder, "cpu", tied=tied)
    (folder / "tokenizer.json").write_text("{}")
    store = open_store(str(part.folder / "store"))
    store.publish("model/", folder_files(folder), request="model")
    lengths = [300, 17, 211, 130, 64, 299, 5, 77, 250, 190, 33, 120]
    return store, documents(lengths, SHAPES[shape]["vocab_size"], 0.3)


def settings_of(**changes: Any) -> Any:
    from forge_core.training.settings import TrainerSettings

    common = {"learning_rate": 1e-4, "seq_len": 300, "token_budget": 1024, "timeout_s": 60.0}
    return TrainerSettings(**{**common, **changes})


def three_steps(trainer: Any, samples: list[Any], folder: Path) -> tuple[list[tuple[float, float]], list[list[float]]]:
    """Loss and gradient norm of each step, and the probe of what they made."""
    from forge_core.models import probe

    done = [trainer.train_samples(samples, totals=totals_of(samples), temperature=0.9) for _ in range(3)]
    trainer.push_weights(folder)
    found = probe.read(folder)
    assert found is not None
    return [(result.loss, step.grad_norm) for result, step in done], found["logprobs"]


def compare_steps(part: Part, name: str, found: Any, expected: Any, limit: float, probe_limit: float) -> None:
    losses = [abs(a[0] - b[0]) for a, b in zip(found[0], expected[0], strict=True)]
    norms = [abs(a[1] - b[1]) / b[1] for a, b in zip(found[0], expected[0], strict=True)]
    part.at_most(f"{name}/loss", max(losses), limit)
    part.at_most(f"{name}/relative_norm", max(norms), 10 * limit)
    gap = max(mean_gap(a, b) for a, b in zip(found[1], expected[1], strict=True))
    part.at_most(f"{name}/probe", gap, probe_limit)


def one_rank(part: Part, store: Any, **changes: Any) -> Any:
    from forge_core.algorithms.losses import GRPOLoss
    from forge_core.training.stored import StoredTrainer

    trainer = StoredTrainer(store, "model/", settings_of(**changes), GRPOLoss(**LOSS), device=part.device)  # type: ignore[arg-type]
    trainer.setup()
    return trainer


def ranks(part: Part) -> None:
    """Two ranks, data-parallel and tensor-parallel, in float32 and in bfloat16, beside one."""
    like_one_rank(part, ("data_parallel", "tensor_parallel"), *small_model(part))


def pipeline(part: Part) -> None:
    """Two stages of a pipeline, in float32 and in bfloat16, beside one rank with the whole model."""
    like_one_rank(part, ("pipeline_parallel",), *small_model(part, tied=False))


def like_one_rank(part: Part, degrees: tuple[str, ...], store: Any, samples: list[Any]) -> None:
    for dtype, limit, probe_limit in (("float32", 1e-4, 1e-2), ("bfloat16", 0.02, 0.25))[: 1 + part.on_gpu]:
        alone = one_rank(part, store, dtype=dtype)
        expected = three_steps(alone, samples, part.folder / f"one-{dtype}")
        alone.cleanup()
        for degree in degrees:
            group = two_ranks(part, store, f"{degree}-{dtype}", 150.0, dtype=dtype, **{degree: 2})
            try:
                with part.timed(f"{degree}/{dtype}/start"):
                    group.setup()
                with part.timed(f"{degree}/{dtype}/three_steps"):
                    found = three_steps(group, samples, part.folder / f"{degree}-{dtype}")
                compare_steps(part, f"{degree}/{dtype}", found, expected, limit, probe_limit)
                group.state_digest()  # raises where ranks hold different copies of a parameter
            except Exception as error:  # what the others do is worth knowing too
                part.holds(f"{degree}/{dtype} trained: {error}"[:4000], False)
            finally:
                group.cleanup()


def two_ranks(part: Part, store: Any, name: str, limit: float, **changes: Any) -> Any:
    """``limit``: seconds that one waits for the other."""
    from forge_core.algorithms.losses import GRPOLoss
    from forge_core.devices import Placement, visible_gpus
    from forge_core.training.launch import RankOptions, Rendezvous
    from forge_core.training.rank_group import RankGroup
    from forge_core.training.stored import TrainerSpec

    make_loss = partial(GRPOLoss, **LOSS)  # type: ignore[arg-type]
    return RankGroup(
        TrainerSpec(store.uri, "model/", settings_of(**changes), make_loss), 2,
        loss=make_loss(), logs=part.folder / "logs", scratch="copy/", rendezvous=Rendezvous(name),
        environment=Placement.environment(visible_gpus()[:2]) if part.on_gpu else {},
        options=RankOptions(part.device, threads=1, timeout_s=limit, init_timeout_s=120.0),
    )  # fmt: skip


def stuck(part: Part) -> None:
    """The second of two ranks is stopped: in a step, and before an export, whose waits are NCCL's alone."""
    import os
    import signal
    import threading

    from forge_core.processes import ChildDied
    from forge_core.training.rank_group import RankError

    limit, before = 10.0, part.used()
    store, samples = small_model(part)
    group = two_ranks(part, store, "stuck", limit, data_parallel=2, timeout_s=limit)
    step = lambda batch: group.train_samples(batch, totals=totals_of(batch), temperature=0.9)
    cases = {"step": lambda: step(samples * 400), "export": lambda: group.push_weights(part.folder / "exported")}
    try:
        for name, act in cases.items():
            group.setup()
            step(samples)
            stop = threading.Timer(1.0 if name == "step" else 0.0, os.kill, (group._pids[1], signal.SIGSTOP))
            stop.start()
            time.sleep(0.2)
            said = ""
            with part.timed(f"{name}/until_the_error"):
                try:
                    act()
                except (ChildDied, RankError) as error:
                    said = str(error)
            part.holds(f"{name}: the error names comm.timeout_s: {said[:2000]}", "comm.timeout_s" in said)
            part.at_most(f"{name}/seconds", part.figures[f"{name}/until_the_error_s"][0], limit + 20.0)
            group.cleanup()
    finally:
        group.cleanup()
    deadline = time.monotonic() + 20.0
    while part.used() > before + 0.1 * GIB and time.monotonic() < deadline:
        time.sleep(0.1)
    part.at_most("left_on_the_gpu_gib", (part.used() - before) / GIB, 0.1)


def export(part: Part) -> None:
    """What a trainer on the last GPU publishes is what it computes with, tensor for tensor, from a thread of its own:
    one that has not been told otherwise works with the first GPU's queue."""
    from forge_core.algorithms.losses import GRPOLoss
    from forge_core.devices import visible_gpus
    from forge_core.engine_thread import EngineThread
    from forge_core.training.settings import TrainerSettings
    from forge_core.training.trainer import TitanTrainer

    device = f"cuda:{len(visible_gpus()) - 1}" if part.on_gpu else CPU
    settings = TrainerSettings(
        learning_rate=1e-3, seq_len=PROMPT + RESPONSE, dtype="bfloat16", weights_dtype="bfloat16"
    )
    trainer = TitanTrainer(part.model(), settings, GRPOLoss(**LOSS), device=device)  # type: ignore[arg-type]
    samples, thread = documents([PROMPT + RESPONSE] * 8, 500, 0.5), EngineThread("trainer")
    part.figures["device"] = device
    try:
        thread.call(trainer.setup)
        for step in range(6):
            thread.call(trainer.train_samples, samples, totals=totals_of(samples), temperature=1.0)
            folder = part.folder / f"version-{step}"
            with part.timed("push_weights"):
                thread.call(trainer.push_weights, folder)
            part.at_most(f"tensors_that_differ_in_version_{step}", thread.call(unlike, trainer, folder), 0)
    finally:
        thread.close()


def unlike(trainer: Any, folder: Path) -> int:
    """How many tensors of ``folder`` are not the trainer's own, rounded."""
    from safetensors.torch import load_file

    from forge_core.training.architecture import hf_names

    found = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    names, own = hf_names(trainer._arch), trainer._masters.parameters
    pairs = [(found[theirs], own[ours]) for theirs, ours in names.items() if ours in own]
    return sum(not torch.equal(theirs, ours.detach().to(theirs.dtype).cpu()) for theirs, ours in pairs)


def float8(part: Part) -> None:
    """Three steps in float8 and in bfloat16; on a CPU, and without torchao, the refusal."""
    store, samples = small_model(part)
    expected = three_steps(one_rank(part, store, dtype="bfloat16"), samples, part.folder / "bfloat16")
    try:
        trainer = one_rank(part, store, dtype="bfloat16", float8=True)
    except ValueError as refusal:
        part.holds(f"the refusal names the key: {refusal}", "quantize.float8" in str(refusal))
        raise Skipped(str(refusal)) from refusal
    compare_steps(
        part, "float8", three_steps(trainer, samples, part.folder / "float8"), expected, limit=0.1, probe_limit=1.0
    )


# oom -----------------------------------------------------------------------------------------------------------------


def oom(part: Part) -> None:
    """Each role, with a GPU that something else has filled."""
    if not part.on_gpu:
        raise Skipped("needs a GPU; tests/generation and tests/training do it for the CPU")
    ctx = new_context(part, grpo={"n_samples": 8, "beta": 0.1})
    samples = documents([PROMPT + RESPONSE] * 32, 1000, 0.5)
    pairs = [(s.tokens[:PROMPT], s.tokens[PROMPT:]) for s in samples]
    trainer = one_rank_of(part, ctx)
    trainer.train_samples(samples, totals=totals_of(samples), temperature=1.0)
    ctx.reference.logprobs(pairs)
    embedded = embedded_generator(part, ctx)
    embedded.generate(many(8, 8))
    works: dict[str, tuple[str, Callable[[], Any]]] = {
        "trainer": ("trainer", lambda: trainer.train_samples(samples, totals=totals_of(samples), temperature=1.0)),
        "reference": ("reference model", lambda: ctx.reference.logprobs(pairs)),
        "hf": ("generator", lambda: embedded.generate(many(512, RESPONSE))),
        "vllm": ("generator", lambda: ctx.generator(0)),
    }
    try:
        for name, (role, work) in works.items():
            torch.cuda.empty_cache()
            filler = fill(leave=0.05 * GIB)
            with part.timed(name):
                message = out_of_memory(work)
            del filler
            part.figures[f"{name}_message"] = message.splitlines()[:12]
            for wanted in (f"{role}: out of memory", "GPU 0: total", "settings that change it"):
                part.holds(f"{name}: the message lacks {wanted!r}: {message[:300]}", wanted in message)
    finally:
        embedded.shutdown()
        ctx.close()


def one_rank_of(part: Part, ctx: Any) -> Any:
    from forge_core.algorithms.losses import build_loss
    from forge_core.training.settings import TrainerSettings
    from forge_core.training.stored import StoredTrainer

    settings, model = TrainerSettings.from_config(ctx.config), ctx.ledger.weights_prefix(0)
    trainer = StoredTrainer(ctx.store, model, settings, build_loss(ctx.config), device=part.device)
    trainer.setup()
    return trainer


def embedded_generator(part: Part, ctx: Any) -> Any:
    from forge_core.generation.hf import HFGenerator

    return HFGenerator(ctx.weights_dir, version=0, dtype=part.dtype, device=part.device)


def many(count: int, tokens: int) -> list[Any]:
    from forge_core.data_model import GenerationRequest, SamplingParams

    sampling = SamplingParams(max_new_tokens=tokens)
    return [GenerationRequest(f"many/{i}", tuple(range(3, 3 + PROMPT)), i, sampling) for i in range(count)]


def fill(leave: float) -> list[torch.Tensor]:
    """Take the GPU's free memory but for ``leave`` bytes, in pieces."""
    taken, piece = [], GIB
    while piece >= 16 * 1024**2:
        while torch.cuda.mem_get_info()[0] - leave > piece:
            taken.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
        piece //= 2
    return taken


def out_of_memory(work: Callable[[], Any]) -> str:
    from forge_core.observability.memory import OutOfMemory

    try:
        work()
    except OutOfMemory as error:
        return str(error)
    except Exception as error:
        return f"another error, {type(error).__name__}: {error}"
    return "no error: the memory sufficed"


# memory --------------------------------------------------------------------------------------------------------------


def memory(part: Part) -> None:
    """Peak memory of each role over what the estimate says; the trainer with a full micro-batch of long documents."""
    if not part.on_gpu:
        raise Skipped("needs a GPU; tests/runs/test_memory_estimate.py does it for the CPU")
    from forge_core.devices import gpu_memory, place
    from forge_core.runs.memory_estimate import roles_memory
    from forge_core.runs.model_shape import model_shape

    training = {"batch_size": 16, "seq_len": 2048, "token_budget": 16384, "dtype": part.dtype}
    ctx = new_context(part, grpo={"n_samples": 8, "beta": 0.1}, training=training)
    gpus = gpu_memory()
    estimate = roles_memory(ctx.config, model_shape(ctx.config), place(ctx.config, tuple(gpus)), gpus)
    expected = {role.role.split(",")[0]: role for role in estimate}
    samples = documents([2048] * 8, 1000, 0.5)
    pairs = [(s.tokens[:1024], s.tokens[1024:]) for s in samples]

    with peak_of(part, "trainer", expected["trainer"].total):
        trainer = one_rank_of(part, ctx)
        for _ in range(2):
            trainer.train_samples(samples, totals=totals_of(samples), temperature=1.0)
        trainer.cleanup()
        del trainer
    with peak_of(part, "reference", expected["reference"].total):
        ctx.reference.logprobs(pairs)
    ctx.__dict__.pop("reference").close()
    torch.cuda.empty_cache()
    before = part.used()
    with part.timed("vllm_start"):
        ctx.generator(0)
    compare_memory(part, "generator", part.used() - before, expected["generator"].total)
    ctx.close()


@contextmanager
def peak_of(part: Part, role: str, expected: int) -> Iterator[None]:
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    compare_memory(part, role, torch.cuda.max_memory_allocated() - before, expected)


def compare_memory(part: Part, role: str, found: int, expected: int) -> None:
    """An estimate may be twice what is taken, and too low by a tenth."""
    ratio = found / expected
    part.figures[role] = {
        "gib": round(found / GIB, 2),
        "estimate_gib": round(expected / GIB, 2),
        "ratio": round(ratio, 3),
    }
    part.holds(f"{role} takes {ratio:.2f} of its estimate", 0.5 <= ratio <= 1.1)


# kill ----------------------------------------------------------------------------------------------------------------


def kill(part: Part) -> None:
    """``kill -9`` of a run whose engine and trainer are on the GPU: nothing stays on it, and the run goes on. Its rates
    are those of its metrics."""
    from benchmarks.smollm2_gpu import RATES
    from forge_core.query import query
    from forge_core.store import Ledger, open_store
    from tests.faults.processes import Forge, write_config

    folder = part.folder / "killed"
    settings = run_settings(part) | {"steps": 6}
    settings["generator"]["engine_args"]["enforce_eager"] = True  # it starts twice
    path, before = write_config(folder, settings), part.used()
    ledger = Ledger(open_store(str(folder / "store")), "part")
    run = Forge(folder, "train", path, own_server=True)
    try:
        run.wait_until(lambda: ledger.head() >= 2, 300.0)
        part.figures["in_use_gib"] = round((part.used() - before) / GIB, 2)
        run.kill()
        with part.timed("free_after_a_kill"):
            left = run.orphans(20.0)
            while part.used() > before + 0.1 * GIB and len(left) == 0 and time.monotonic() < run.started + 600:
                time.sleep(0.1)
    finally:
        run.end()
    part.holds(f"processes outlive the run: {left}", not left)
    part.at_most("left_on_the_gpu_gib", (part.used() - before) / GIB, 0.1)
    resumed = Forge(folder, "resume", "part", "--store", folder / "store", own_server=True)
    try:
        part.holds("the run goes on to its end", resumed.wait(300.0) == 0 and ledger.head() == 6)
    finally:
        resumed.end()
    rates = query(["part"], RATES, store=str(folder / "store")).to_pylist()
    part.figures["rates"] = {row["key"]: row["median"] for row in rates}
    part.note()


PARTS = {
    work.__name__: work
    for work in (sleep, sleep_apart, vllm_tp, ranks, pipeline, stuck, export, float8, oom, memory, kill)
}


def main() -> None:
    name, device, shape, answer = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        part = Part(device, shape, Path(folder), Path(answer))
        if device == "cuda":
            part.figures["gpu"] = torch.cuda.get_device_name()
        status = {"status": "ok"}
        try:
            PARTS[name](part)
        except Skipped as why:
            status = {"status": "skipped", "why": str(why)}
        if part.wrong:
            status["status"] = "wrong"
        part.note(**status)
        print(Path(answer).read_text(), flush=True)


if __name__ == "__main__":
    main()

"""Version 0: the run's first act.

Invariants: version 0 is published and named by ``ledger/init.json`` before anything is sampled; a pretrained model is
published as it is, byte for byte; a model made on the spot, or one with a warm start, goes through the trainer. Two
processes may do it at once: the first ``init.json`` wins. A warm start leaves nothing on its GPU: the engine that comes
next may be another process's.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_core.algorithms.ops import Totals
from forge_core.config import RunConfig
from forge_core.config.data_sections import ScratchModel, WarmStartSection
from forge_core.data.curriculum import curriculum_of
from forge_core.data.cursor import Cursor, next_rows
from forge_core.data.prompts import PromptSet, load_prompts, render, split_holdout
from forge_core.devices import free_cached_memory
from forge_core.engine_thread import EngineThread
from forge_core.models.imports import import_model_code
from forge_core.models.probe import PROBE
from forge_core.models.resolve import MODEL_FILES
from forge_core.observability.memory import SETTINGS, memory_guard
from forge_core.runs.context import RunContext
from forge_core.runs.prompt_checks import prompt_warnings
from forge_core.runs.record import now
from forge_core.store import digest, layout
from forge_core.temporary import temporary_folder
from forge_core.training.packing import Sample
from forge_core.training.settings import TrainerSettings


def initialise(ctx: RunContext) -> dict[str, Any]:
    """Publish version 0 and commit ``init.json``, unless the run has one; returns it.

    Every process that works on the run calls this before it starts threads: see ``import_model_code``.
    """
    if ctx.ledger.init() is None:
        for warning in prompt_warnings(ctx.config, ctx.prompts) if ctx.config.dataset and ctx.samples else ():
            ctx.note(f"warning: {warning}")
        _publish_version_zero(ctx)
    committed = ctx.ledger.init()
    assert committed is not None
    import_model_code(ctx.weights_dir(0))
    ctx.metric_log.open()
    return committed


def _publish_version_zero(ctx: RunContext) -> None:
    started_at, started = now(), time.monotonic()
    with temporary_folder("init") as temporary:
        folder, metrics = initial_model(ctx, temporary)
        prefix = layout.weights(ctx.run_id, 0, ctx.attempt)
        files = {f.name: f for f in sorted(folder.iterdir()) if f.suffix in MODEL_FILES}
        if ctx.config.warm_start is None:  # a probe beside a model that this run did not train is of unknown weights
            files.pop(PROBE, None)
        request = digest({"stage": "weights", "model": _identity(ctx.config), "run": ctx.run_id})
        manifest = ctx.store.publish(prefix, files, request=request)
        pretrained = temporary not in folder.parents  # and stays where it is
        ctx.weights.adopt(manifest, folder, copy=pretrained)
    entry = {
        "version": 0,
        "weights": prefix,
        "weights_digest": manifest.content,
        "state_digest": manifest.content,
        "model": _identity(ctx.config)["model"],
        "attempt": ctx.attempt,
        "metrics": {**metrics, "time/initialise": time.monotonic() - started},
        "started_at": started_at,
        "finished_at": now(),
    }
    ctx.ledger.commit_init(entry)


def _identity(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", include={"model", "warm_start"})


def initial_model(ctx: RunContext, scratch: Path) -> tuple[Path, dict[str, float]]:
    """A folder with the HF files of version 0 and the metrics of making them."""
    folder = base_model(ctx.config, scratch / "base")
    warm = ctx.config.warm_start
    if warm is None:
        return folder, {}
    thread = EngineThread("warm-start", ctx.config.training.threads)
    try:
        loss = thread.call(_warm_start, ctx, warm, folder, scratch / "warm")
    finally:
        thread.close()
    return scratch / "warm", {"warm_start/loss": loss}


def base_model(config: RunConfig, scratch: Path) -> Path:
    """The folder of the configured model: made in ``scratch``, or the local snapshot of a pretrained one."""
    from forge_core.models.scratch import create
    from forge_core.models.stored import configured_model

    if isinstance(config.model, ScratchModel):
        create(config.model, config.run.seed, scratch)
        return scratch
    return configured_model(config)


@memory_guard("warm start", SETTINGS["warm start"])
def _warm_start(ctx: RunContext, warm: WarmStartSection, base: Path, target: Path) -> float:
    """Supervised steps on demonstrations; writes the result to ``target`` and returns the last loss."""
    from transformers import AutoTokenizer

    from forge_core.training.sft_loss import SFTLoss
    from forge_core.training.trainer import TitanTrainer

    settings = _warm_start_settings(ctx.config, warm)
    trainer = TitanTrainer(base, settings, SFTLoss(), device=ctx.device("trainer"))
    trainer.setup()
    demonstrations = load_prompts(warm.dataset, seed=ctx.config.run.seed, needs_answer=True, key="warm_start.dataset")
    rows, _ = split_holdout(demonstrations, ctx.config.eval.holdout)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    loss = 0.0
    for step, samples in enumerate(_demonstration_batches(ctx.config, warm, demonstrations, rows, tokenizer)):
        totals = Totals(sum(sum(s.loss_mask) for s in samples), len(samples))
        loss = trainer.train_samples(samples, totals=totals, temperature=1.0, stop=ctx.stop)[0].loss
        if (step + 1) % 100 == 0 or step + 1 == warm.steps:
            ctx.note(f"warm start: step {step + 1} of {warm.steps}, loss {loss:.3f}")
    target.mkdir()
    trainer.push_weights(target)
    trainer.cleanup()
    gc.collect()  # compiled layers refer to themselves
    free_cached_memory()
    return loss


def _warm_start_settings(config: RunConfig, warm: WarmStartSection) -> TrainerSettings:
    return dataclasses.replace(
        TrainerSettings.from_config(config),
        learning_rate=warm.learning_rate,
        warmup_steps=warm.warmup_steps,
        lr_decay="cosine",
        lr_min_ratio=0.1,
        total_steps=warm.steps,
        weight_decay=warm.weight_decay,
        betas=(0.9, 0.98),
        data_parallel=1,  # in this process
        tensor_parallel=1,
        pipeline_parallel=1,
    )


def _demonstration_batches(
    config: RunConfig, warm: WarmStartSection, demonstrations: PromptSet, rows: list[int], tokenizer: Any
) -> Iterator[list[Sample]]:
    """Batches of demonstrations; those on held-out prompts (by the same hash as the evaluation) are left out."""
    curriculum = curriculum_of(demonstrations, rows, warm.dataset.curriculum, "warm_start.dataset")
    order = next_rows(Cursor(0, 0), rows, config.run.seed, warm.dataset.shuffle, curriculum)
    for _ in range(warm.steps):
        yield [_demonstration(demonstrations, next(order)[0], warm, tokenizer) for _ in range(warm.batch_size)]


def _demonstration(demonstrations: PromptSet, row: int, warm: WarmStartSection, tokenizer: Any) -> Sample:
    prompt = demonstrations[row]
    before = render(prompt, tokenizer, warm.dataset.chat_template)
    answer = [*tokenizer.encode(prompt.target or "", add_special_tokens=False), tokenizer.eos_token_id]
    mask = [False] * len(before) + [True] * len(answer)
    return Sample(before + answer, mask, [float(m) for m in mask], None, None)

"""The reference model of a run: version 0, frozen, in a thread of its own; or the teacher that is distilled.

Invariants:
- A teacher has the policy's tokenizer, token for token; another one is refused, by key.
- A teacher is found and hashed once per context. One that is a run's version stays on this machine as long as this
  process, whatever becomes of it in the store.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.config import ConfigError
from forge_core.config.loss_sections import DistillLossSection
from forge_core.engine_thread import EngineThread
from forge_core.models.stored import configured_model
from forge_core.observability.memory import SETTINGS, memory_guard
from forge_core.once import once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forge_core.config import RunConfig
    from forge_core.runs.context import RunContext


class ReferenceSession:
    """Loads the model when it is first asked."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._thread = EngineThread("reference", ctx.config.training.threads or ctx.cpu_threads)
        self._model: Any = None

    def logprobs(self, samples: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Log-probability of each response token of (prompt ids, response ids), at the sampling temperature."""
        return self._thread.call(self._logprobs, samples)

    @memory_guard("reference model", SETTINGS["reference model"])
    def _logprobs(self, samples: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        from forge_core.reference.model import ReferenceModel

        ctx = self._ctx
        if self._model is None:
            t = ctx.config.training
            self._model = ReferenceModel(
                reference_folder(ctx),
                token_budget=ctx.config.token_budget,
                seq_len=t.seq_len,
                dtype=t.dtype,
                device=ctx.device("ref_model"),
                compile=t.compile,
            )
            self._model.setup()
        return self._model.forward(samples, ctx.config.grpo.temperature, stop=ctx.stop)

    def close(self) -> None:
        self._thread.close()


class Teacher:
    """The teacher of a run with ``config``, looked for when it is first asked for. Raises ModelError, StoreError."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    @once
    def folder(self) -> Path:
        return teacher_folder(self._config)

    @once
    def digest(self) -> str:
        """What it is known by."""
        from forge_core.evaluation.policies import folder_policy  # imports what imports this file

        return folder_policy("teacher", self.folder).digest


def reference_folder(ctx: RunContext) -> Path:
    """The folder of the reference model. Raises ConfigError for a teacher that cannot grade the policy's tokens."""
    if not ctx.config.distils:
        return ctx.weights_dir(0)
    teacher, student = ctx.teacher.folder, ctx.weights_dir(0)
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        theirs, ours = teacher / name, student / name
        if theirs.is_file() and ours.is_file() and theirs.read_bytes() != ours.read_bytes():
            raise ConfigError(
                f"loss.teacher: {teacher} has another tokenizer ({name}) than the policy: tokens would mean something "
                "else to it; choose a teacher of the same family"
            )
    return teacher


def teacher_folder(config: RunConfig) -> Path:
    """The checked local folder of the teacher. Raises ModelError, StoreError."""
    assert isinstance(config.loss, DistillLossSection)
    return configured_model(config.model_copy(update={"model": config.loss.teacher}))


def reference_digest(ctx: RunContext) -> str:
    """What the reference model is known by in what is made with it."""
    if ctx.config.distils:
        return ctx.teacher.digest
    return ctx.store.open_published(ctx.ledger.weights_prefix(0)).manifest.content

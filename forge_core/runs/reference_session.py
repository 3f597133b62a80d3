"""The reference model of a run: version 0, frozen, in a thread of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_core.engine_thread import EngineThread
from forge_core.observability.memory import SETTINGS, memory_guard

if TYPE_CHECKING:
    from collections.abc import Sequence

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
                ctx.weights_dir(0),
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

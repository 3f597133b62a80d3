"""Frozen reference policy: log-probabilities of responses.

Guarantees:
- It is the trainer's own model code and layout: with equal weights its log-probabilities equal the trainer's, so the KL
  term starts at zero. On a CPU they are equal bit for bit; a GPU's matrix products may differ in the last bit.
- It never changes, draws no random number and keeps no gradient. It runs on a CPU or a GPU, beside a trainer in one
  process or alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from forge_core.devices import work_on
from forge_core.stop import StopToken
from forge_core.training import hf_io, policy
from forge_core.training.architecture import read_architecture
from forge_core.training.packing import PAD_ID, Sample, pack, round_up, sizes_for


class ReferenceModel:
    """``model_dir``: a Hugging Face folder. ``token_budget``: positions of one forward pass. ``seq_len``: longest
    prompt plus response, in tokens. ``threads``: CPU threads of the calling thread, set in ``setup``.
    ``compile``: compile the layers, as the trainer does."""

    def __init__(
        self,
        model_dir: Path,
        *,
        token_budget: int,
        seq_len: int,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int | None = None,
        compile: bool = False,
    ) -> None:
        self.model_dir, self.token_budget, self.seq_len = Path(model_dir), token_budget, seq_len
        self.dtype = cast(torch.dtype, getattr(torch, dtype))
        self.device, self.threads, self.compile = torch.device(device), threads, compile
        self._model: Any = None

    def setup(self) -> None:
        """Load the weights. Raises ValueError for a folder that the model code cannot compute exactly."""
        arch = read_architecture(self.model_dir)
        from forge_core.training.titan_parallel import build_frozen

        work_on(self.device)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self._model = build_frozen(arch, self.seq_len, self.device, self.dtype, compiled=self.compile)
        hf_io.load_weights(dict(hf_io.named_parameters(self._model)), arch, self.model_dir)

    def forward(
        self,
        samples: Sequence[tuple[list[int], list[int]]],
        temperature: float = 1.0,
        stop: StopToken | None = None,
    ) -> list[list[float]]:
        """Log-probability of every response token of every (prompt ids, response ids), at ``temperature`` (above 0).

        Raises ValueError for an empty prompt (nothing would predict the first token) or a sample longer than
        ``seq_len``, and ``Stopped`` between micro-batches when ``stop`` is set.
        """
        if self._model is None:
            raise RuntimeError("the reference model has no weights: call setup() first")
        results: list[list[float]] = [[] for _ in samples]
        counted = [index for index, (_, response) in enumerate(samples) if response]
        documents = [_sample(index, *samples[index]) for index in counted]
        sizes = sizes_for(self.device, self.compile)
        batches = pack(documents, self.token_budget, PAD_ID, self.seq_len, sizes=sizes)
        found = policy.document_logprobs(
            lambda batch: policy.logprobs(self._model, batch, temperature)[0],
            batches,
            self.dtype,
            self.device,
            round_up(self.seq_len),
            stop,
        )
        for index, logprobs in zip(counted, found, strict=True):
            results[index] = logprobs
        return results

    def cleanup(self) -> None:
        """Free the weights; ``setup`` loads them again."""
        self._model = None


def _sample(index: int, prompt: list[int], response: list[int]) -> Sample:
    if not prompt:
        raise ValueError(f"sample {index} has an empty prompt: its first token cannot be predicted")
    mask = [False] * len(prompt) + [True] * len(response)
    return Sample(list(prompt) + list(response), mask, [0.0] * len(mask))

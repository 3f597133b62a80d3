"""The embedded generator: ``transformers`` in this process, no server, CPU or one GPU.

Guarantees:
- All work runs in one thread of its own (``forge_core.engine_thread.EngineThread``); concurrent calls queue, so a
  call is sampled by exactly one policy version, and an update takes effect between calls.
- Equal requests in an equal call give bitwise equal tokens and log-probabilities on one machine, in any process.
- A set stop token ends the work before the next layer of the model is computed.
- An update whose files do not fit, or do not compute what the trainer published (``models/probe.py``), leaves the old
  version serving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from forge_core.algorithms.ops import compute_logprobs
from forge_core.data_model import Completion, GenerationRequest, VersionSpan
from forge_core.devices import work_on
from forge_core.engine_thread import EngineThread
from forge_core.generation.base import check_newer, check_requests, check_versions
from forge_core.generation.completions import Sampled, completions
from forge_core.generation.decoding import BatchDecoder, DeadlineReached, Decoded, OnToken, make_batches
from forge_core.generation.eos import eos_token_ids
from forge_core.models import probe
from forge_core.models.weights import build_model, fitted, load_into, read_tensors
from forge_core.observability.memory import SETTINGS, memory_guard
from forge_core.stop import StopToken

_guarded = memory_guard("generator", SETTINGS["hf generator"])


class HFGenerator:
    """A ``Generator`` on ``transformers``.

    ``weights(version)`` gives the local model folder of a policy version; it is called in the caller's thread.
    ``max_batch`` limits the sequences decoded together. ``threads``: CPU threads (None: torch's choice).
    """

    def __init__(
        self,
        weights: Callable[[int], Path],
        *,
        version: int,
        dtype: str = "float32",
        device: str = "cpu",
        max_batch: int = 512,
        threads: int | None = None,
    ) -> None:
        self._weights = weights
        self._max_batch = max_batch
        self._version = version
        self._guard: Callable[[], None] = lambda: None
        self._model: Any = None
        self._thread = EngineThread("generator", threads)
        try:
            self._thread.call(self._load, weights(version), getattr(torch, dtype), device)
        except BaseException:
            self._thread.close()  # nobody else could
            raise

    @property
    def max_positions(self) -> int:
        """Tokens of prompt and response together, at most."""
        return int(self._config.max_position_embeddings)

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer (the first version's; training never changes it)."""
        return self._tokenizer

    def generate(
        self, requests: Sequence[GenerationRequest], *, stop: StopToken | None = None, deadline_s: float | None = None
    ) -> list[Completion]:
        """Sample one completion per request, in order; see the protocol for errors, stop and deadline."""
        config = self._config
        check_requests(requests, max_positions=config.max_position_embeddings, vocab_size=config.vocab_size)
        check_versions(requests, self._version)
        if not requests:
            return []
        priority = min(r.priority for r in requests)
        return self._thread.call(self._generate, requests, stop=stop, deadline_s=deadline_s, priority=priority)

    def stream(self, request: GenerationRequest, on_token: OnToken, *, stop: StopToken | None = None) -> Completion:
        """``generate`` for one request; ``on_token`` gets each token as it is sampled, in the engine's thread."""
        config = self._config
        check_requests([request], max_positions=config.max_position_embeddings, vocab_size=config.vocab_size)
        check_versions([request], self._version)
        (made,) = self._thread.call(self._generate, [request], stop=stop, deadline_s=None, on_token=on_token)
        return made

    def update_weights(self, version: int) -> None:
        """Load ``version`` in place. ValueError for an older version; WeightsError for files that do not fit, and when
        they do not compute what the trainer published."""
        if version == self._version:
            return
        check_newer(version, self._version)
        folder = self._weights(version)
        tensors = read_tensors(folder)
        # Ahead of queued calls: they were to be sampled by the newest version.
        self._thread.call(self._update, version, tensors, folder, priority=-1)

    def get_version(self) -> int:
        return self._version

    def run(self, stop: StopToken) -> None:
        """Serve until ``stop`` is set; the engine's own thread does the work."""
        stop.wait()

    def shutdown(self) -> None:
        self._thread.close()
        self._model = None

    @_guarded
    def _load(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        from transformers import AutoTokenizer

        work_on(torch.device(device))
        self._model = build_model(folder, dtype=dtype, device=device)
        self._config = self._model.config
        self._check(dict(self._model.named_parameters()), folder, self._version)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._eos_ids = eos_token_ids(folder, self._config.eos_token_id, self._tokenizer)
        for layer in self._model.model.layers:
            layer.register_forward_pre_hook(lambda *_: self._guard())

    @_guarded
    def _update(self, version: int, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        check_newer(version, self._version)
        self._check(fitted(self._model, tensors, folder), folder, version)
        load_into(self._model, tensors, folder)
        self._version = version

    @torch.inference_mode()
    def _check(self, tensors: dict[str, torch.Tensor], folder: Path, version: int) -> None:
        """Raise ProbeFailed unless the model computes with ``tensors`` what was published with them."""
        if (expected := probe.read(folder)) is None:
            return
        model, self._guard = self._model, lambda: None
        used = {name: tensors[name].to(p.device, p.dtype) for name, p in model.named_parameters()}
        ids_BT = torch.tensor(expected["token_ids"], device=model.device)
        logits_BTV = functional_call(model, used, (ids_BT[:, :-1],)).logits
        logprobs_BT = compute_logprobs(logits_BTV.float(), ids_BT[:, 1:])
        probe.check(expected, logprobs_BT.tolist(), str(model.dtype).removeprefix("torch."), version)

    @_guarded
    def _generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        stop: StopToken | None,
        deadline_s: float | None,
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        deadline = (
            None if deadline_s is None else time.monotonic() + deadline_s
        )  # waiting for the engine is not counted
        self._guard = lambda: _check(stop, deadline)
        results: list[Completion | None] = [None] * len(requests)
        for batch in make_batches(requests, self._max_batch, self._cache_bytes_per_token()):
            members = [requests[i] for i in batch]
            decoded = BatchDecoder(self._model, members, self._eos_ids, self._guard, on_token).run()
            made = completions(self._tokenizer, members, [self._sampled(d) for d in decoded])
            for i, completion in zip(batch, made, strict=True):
                results[i] = completion
        return [c for c in results if c is not None]

    def _sampled(self, decoded: Decoded) -> Sampled:
        length = len(decoded.token_ids)
        spans = [VersionSpan(self._version, 0, length)] if length else []
        return Sampled(decoded.token_ids, decoded.logprobs, decoded.finish_reason, self._version, spans)

    def _cache_bytes_per_token(self) -> int:
        config = self._config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * self._model.dtype.itemsize


def _check(stop: StopToken | None, deadline: float | None) -> None:
    if stop is not None:
        stop.check()
    if deadline is not None and time.monotonic() > deadline:
        raise DeadlineReached

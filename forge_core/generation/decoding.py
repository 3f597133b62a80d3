"""Batched decoding of one batch of requests with a KV cache.

How it works: equal prompts are computed once (the samples of a group share theirs); prompts are padded on the left to
the batch's longest, with positions that start at 0 at the first real token; then every step feeds one token per row.
Rows that ended are taken out of the batch once they are an eighth of it.

Guarantees:
- Padding, batch-mates and rows taken out change a row's numbers by rounding only; equal calls give equal bits.
- ``guard`` is called before every layer and every step. What it raises ends the work at once; ``DeadlineReached``
  is answered with what is sampled so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.data_model import GenerationRequest
from forge_core.generation.sampling import RowSampling, draw_uniforms, sample

PREFILL_TOKENS = 4096  # prompt tokens of one forward pass: bounds the memory of activations
KV_CACHE_BYTES = 2 << 30  # rows of a batch are limited to this
COMPACT_SHARE = 7 / 8  # rows that ended are taken out when at most this share is left: copying the cache costs too

Guard = Callable[[], None]
OnToken = Callable[[int], None]


class DeadlineReached(Exception):
    """Raised by a guard: hand back what there is."""


@dataclass(frozen=True)
class Decoded:
    """The sampled tokens of one request, EOS included, and their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "aborted"]


def make_batches(requests: Sequence[GenerationRequest], max_batch: int, cache_bytes_per_token: int) -> list[list[int]]:
    """Indices of the requests, shortest prompts first (little padding), in batches whose cache fits."""
    order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids))
    batches: list[list[int]] = []
    longest = 0
    for i in order:
        size = len(requests[i].prompt_ids) + requests[i].sampling.max_new_tokens
        rows = len(batches[-1]) + 1 if batches else 0
        fits = rows <= max_batch and rows * max(longest, size) * cache_bytes_per_token <= KV_CACHE_BYTES
        if rows and fits:
            batches[-1].append(i)
            longest = max(longest, size)
        else:
            batches.append([i])
            longest = size
    return batches


@dataclass
class _Live:
    """The ``R`` rows that are still in the batch: their cache, settings and shape."""

    cache: Any
    index: Tensor  # [R] which request
    lengths: Tensor  # [R] prompt tokens
    ended: Tensor  # [R] bool: done, waiting to be taken out
    visible: Tensor | None  # [R, columns] bool: false at padding; None when nothing is padded
    sampling: RowSampling

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.index, self.lengths, self.ended = self.index[rows], self.lengths[rows], self.ended[rows]
        self.visible = None if self.visible is None else self.visible[rows]
        self.sampling = self.sampling.select(rows)


class BatchDecoder:
    """Decodes ``requests`` (sorted by prompt length) together; ``run`` may be called once. ``on_token`` gets each token
    of a single request as soon as it is sampled.

    Tensors: ``N`` requests, ``U`` different prompts, ``R`` live rows, ``T`` the largest ``max_new_tokens``.
    """

    def __init__(
        self,
        model: Any,
        requests: Sequence[GenerationRequest],
        eos_ids: Sequence[int],
        guard: Guard,
        on_token: OnToken | None = None,
    ) -> None:
        assert on_token is None or len(requests) == 1
        self._model, self._requests, self._guard, self._on_token = model, requests, guard, on_token
        self._device = next(model.parameters()).device
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=self._device)
        self._limits = self._tensor([r.sampling.max_new_tokens for r in requests])
        self._uniforms = draw_uniforms(requests).to(self._device)  # [N, T]
        self._tokens = torch.full(self._uniforms.shape, -1, device=self._device)
        self._logprobs = torch.zeros(self._uniforms.shape, device=self._device)
        self._steps = 0  # columns of tokens and logprobs that are filled in

    @torch.inference_mode()
    def run(self) -> list[Decoded]:
        with suppress(DeadlineReached):  # the columns filled in so far are whole
            self._decode()
        return self._collect()

    def _decode(self) -> None:
        live, logits_RV = self._prefill()
        while True:
            self._guard()
            tokens_R = self._sample(live, logits_RV)
            rows = (~live.ended).nonzero().squeeze(1)
            if len(rows) == 0:
                return
            if len(rows) <= COMPACT_SHARE * len(live.ended):
                tokens_R = tokens_R[rows]
                live.keep(rows)
            logits_RV = self._step(live, tokens_R)

    def _prefill(self) -> tuple[_Live, Tensor]:
        """All requests as live rows, and the logits ``[N, V]`` of their first tokens."""
        prompts = list(dict.fromkeys(r.prompt_ids for r in self._requests))
        number = {prompt: u for u, prompt in enumerate(prompts)}
        owner_N = self._tensor([number[r.prompt_ids] for r in self._requests])
        longest = len(prompts[-1])
        parts = [self._prefill_chunk(chunk, longest) for chunk in _chunks(prompts)]
        lengths_N = self._tensor([len(p) for p in prompts])[owner_N]
        live = _Live(
            cache=_joined([cache for cache, _ in parts], owner_N),
            index=torch.arange(len(owner_N), device=self._device),
            lengths=lengths_N,
            ended=torch.zeros_like(lengths_N, dtype=torch.bool),
            visible=None,
            sampling=RowSampling.of([r.sampling for r in self._requests], self._device),
        )
        if len(prompts[0]) < longest:
            columns = torch.arange(longest + self._tokens.shape[1], device=self._device)
            live.visible = columns >= (longest - lengths_N)[:, None]
        return live, torch.cat([logits for _, logits in parts])[owner_N]

    def _prefill_chunk(
        self, prompts: list[tuple[int, ...]], longest: int
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Keys and values of each layer, padded on the left to ``longest`` columns, and the last logits."""
        from transformers import DynamicCache

        width = len(prompts[-1])
        ids = self._tensor([(0,) * (width - len(p)) + p for p in prompts])
        positions = (
            torch.arange(width, device=self._device) - (width - self._tensor([len(p) for p in prompts]))[:, None]
        )
        cache: Any = DynamicCache()
        visible = None if len(prompts[0]) == width else positions >= 0
        logits = self._forward(cache, ids, positions.clamp(min=0), visible)
        pad = (0, 0, longest - width, 0)
        return [(F.pad(layer.keys, pad), F.pad(layer.values, pad)) for layer in cache.layers], logits

    def _sample(self, live: _Live, logits_RV: Tensor) -> Tensor:
        """Draw and note the next token of every live row, and mark the rows that end with it."""
        t = self._steps
        tokens_R, logprobs_R = sample(logits_RV, live.sampling, self._uniforms[live.index, t])
        self._tokens[live.index, t] = tokens_R
        self._logprobs[live.index, t] = logprobs_R
        self._steps = t + 1
        if self._on_token is not None:
            self._on_token(int(tokens_R[0]))
        live.ended |= (tokens_R[:, None] == self._eos).any(1) | (self._limits[live.index] <= self._steps)
        return tokens_R

    def _step(self, live: _Live, tokens_R: Tensor) -> Tensor:
        """Feed the newest tokens; the logits ``[R, V]`` of their successors."""
        positions = (live.lengths + self._steps - 1)[:, None]
        columns = live.cache.get_seq_length() + 1
        visible = None if live.visible is None else live.visible[:, :columns]
        return self._forward(live.cache, tokens_R[:, None], positions, visible)

    def _forward(self, cache: Any, ids: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        named_cache = {_cache_argument(type(self._model).forward): cache}
        out = self._model(
            input_ids=ids,
            attention_mask=visible,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **named_cache,
        )
        return out.logits[:, -1]

    def _collect(self) -> list[Decoded]:
        """Cut each row at its first EOS, its limit or the last step."""
        tokens_NT, limits_N = self._tokens[:, : self._steps], self._limits
        # Columns past a row's end hold what it drew while it waited to be taken out; the cut leaves them out.
        columns_T = torch.arange(self._steps, device=self._device)
        is_eos_NT = (tokens_NT[..., None] == self._eos).any(-1) & (columns_T < limits_N[:, None])
        stopped_N = is_eos_NT.any(1)
        first_N = torch.where(is_eos_NT, columns_T + 1, self._tokens.shape[1] + 1).amin(1) if self._steps else limits_N
        lengths_N = torch.where(stopped_N, first_N, limits_N.clamp(max=self._steps))
        columns = (tokens_NT, self._logprobs, lengths_N, stopped_N, limits_N)
        return [
            Decoded(ids[:n], logprobs[:n], "stop" if stopped else "length" if n == limit else "aborted")
            for ids, logprobs, n, stopped, limit in zip(*(c.tolist() for c in columns), strict=True)
        ]

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


@lru_cache
def _cache_argument(forward: Callable[..., Any]) -> str:
    """The name of the cache in a model's ``forward``: transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def _joined(parts: list[list[tuple[Tensor, Tensor]]], rows: Tensor) -> Any:
    """One cache from the prompts' keys and values, with a row for each entry of ``rows`` (prompt numbers)."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for i, layers in enumerate(zip(*parts, strict=True)):
        keys, values = (torch.cat(tensors)[rows] for tensors in zip(*layers, strict=True))
        cache.update(keys, values, i)
    return cache


def _chunks(prompts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Prompts, shortest first, cut so that one forward pass has at most PREFILL_TOKENS tokens with padding."""
    chunks: list[list[tuple[int, ...]]] = [[]]
    for prompt in prompts:
        if chunks[-1] and (len(chunks[-1]) + 1) * len(prompt) > PREFILL_TOKENS:
            chunks.append([])
        chunks[-1].append(prompt)
    return chunks

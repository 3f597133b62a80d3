"""Log-probabilities and entropies: from logits, from hidden states in chunks, at a temperature."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.algorithms.ops import compute_entropy, compute_logprobs, compute_logprobs_from_hidden
from forge_core.training import logprob_head

B, T, D, V = 2, 256, 16, 8192


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes that tensors made inside hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key, storage.nbytes())

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=g).requires_grad_()
    weight = (torch.randn(V, D, generator=g) / D**0.5).requires_grad_()
    targets = torch.randint(0, V, (B, T), generator=g)
    targets[0, :5] = -100
    return hidden, weight, targets, torch.randn(2, B, T, generator=g)


def from_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple:
    logits = hidden @ weight.T
    entropy = torch.where(targets >= 0, compute_entropy(logits, temperature), 0.0)
    return compute_logprobs(logits, targets, temperature), entropy


def measured(function: Any) -> tuple[list[torch.Tensor], int]:
    """Values and gradients of ``function``, and the peak of live bytes of forward and backward."""
    hidden, weight, targets, mix = inputs()
    with LiveBytes() as live:
        logprobs, entropy = function(hidden, weight, targets, 0.7)
        (mix[0] * logprobs + mix[1] * entropy).sum().backward()
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad], live.peak


@pytest.mark.parametrize("kept", [0, 1 << 26], ids=["computed-again", "kept"])
def test_chunked_equals_unchunked_and_the_full_logits_never_exist(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(logprob_head, "_CHUNK", 32 * V)
    monkeypatch.setattr(logprob_head, "_KEPT", kept)
    plain, plain_peak = measured(from_logits)
    chunked, peak = measured(compute_logprobs_from_hidden)
    for found, expected in zip(chunked, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    full = 4 * B * T * V  # bytes of [B, T, V] in float32
    assert plain_peak > 2 * full
    if not kept:
        assert peak < 0.5 * full


def test_kept_chunks_are_bounded_whatever_the_batch() -> None:
    """By default at most 256 MiB of log-probabilities wait for the backward pass, and 64 MiB more are worked on."""
    assert 4 * logprob_head._KEPT == 256 << 20
    assert 4 * logprob_head._CHUNK == 64 << 20


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 2.0])
def test_temperature_divides_logits_before_the_softmax(temperature: float) -> None:
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(2, 3, 11, generator=g, dtype=torch.float64), torch.randint(0, 11, (2, 3), generator=g)
    probabilities = (logits / temperature).exp() / (logits / temperature).exp().sum(-1, keepdim=True)
    expected = probabilities.gather(-1, targets[..., None])[..., 0].log()
    torch.testing.assert_close(compute_logprobs(logits, targets, temperature), expected)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    torch.testing.assert_close(compute_entropy(logits, temperature), entropy)


def test_ignored_targets_give_zero_and_no_gradient() -> None:
    hidden, weight, targets, _ = inputs()
    logprobs, entropy = compute_logprobs_from_hidden(hidden, weight, targets)
    (logprobs + entropy).sum().backward()
    assert logprobs[0, :5].abs().max() == entropy[0, :5].abs().max() == hidden.grad[0, :5].abs().max() == 0
    assert hidden.grad[0, 5:].abs().min(dim=-1).values.max() > 0


def test_impossible_tokens_leave_value_and_gradient_of_the_entropy_finite() -> None:
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]]], requires_grad=True)
    entropy = compute_entropy(logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)
    assert torch.isfinite(logits.grad).all()


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.tensor([[1, 2, 3, 4]])
    found = compute_logprobs(logits, targets)
    assert found.dtype == compute_entropy(logits).dtype == torch.float32
    torch.testing.assert_close(found, compute_logprobs(logits.double(), targets).float())

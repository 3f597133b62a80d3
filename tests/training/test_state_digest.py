"""The fingerprint of a tensor: exact, on any device, for any difference."""

from __future__ import annotations

import torch

from forge_core.training import state_digest
from forge_core.training.state_digest import fingerprints


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    return fingerprints([tensor])[0]


def numbers(count: int = 5000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def test_every_single_bit_counts() -> None:
    x = numbers(64)
    found = {int(fingerprint(x))}
    for place in range(64):
        for bit in range(32):
            changed = x.clone().view(torch.int32)
            changed[place] ^= 1 << bit if bit < 31 else -(2**31)
            found.add(int(fingerprint(changed.view(torch.float32))))
    assert len(found) == 64 * 32 + 1


def test_places_count_and_shapes_and_chunks_do_not(monkeypatch) -> None:
    x = numbers()
    before = int(fingerprint(x))
    swapped = x.clone()
    swapped[[3, 4]] = x[[4, 3]]
    assert int(fingerprint(swapped)) != before
    assert int(fingerprint(x.view(50, 100).t().contiguous().t())) == before
    monkeypatch.setitem(state_digest._CHUNK, "cpu", 7)
    assert int(fingerprint(x)) == before


def test_the_value_is_fixed() -> None:
    """Stored in every ledger: it may never change."""
    assert int(fingerprint(torch.tensor([1.0, -2.5, 0.0]))) == -9014665122025295374


def test_tensors_that_are_mixed_together_have_the_fingerprints_that_each_has_alone() -> None:
    together = [numbers(12).view(3, 4), torch.zeros(0), numbers(5).bfloat16(), numbers(7)]
    assert [int(x) for x in fingerprints(together)] == [int(fingerprint(x)) for x in together]

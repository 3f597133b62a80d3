"""The block mask of packed rows, against torch's own construction of it; and whose choice the kernels are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from forge_core.training import attention
from forge_core.training.attention import _FLEX_BLOCK, block_mask

SHAPES = [  # rows, positions, mean length of a document
    (2, 256, 20),
    (1, 384, 200),
    (3, 1000, 130),
    (1, 2048, 700),
    (2, 130, 3),
    (1, 100, 40),
    (1, 640, 5000),
]


def rows_of_documents(rows: int, length: int, mean: int, padding: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    ids_BT = torch.empty(rows, length, dtype=torch.long)
    for row in ids_BT:
        lengths = torch.randint(1, 2 * mean, (length,), generator=generator)
        row[:] = torch.arange(length).repeat_interleave(lengths)[:length]
        if padding:
            row[length - int(torch.randint(1, length // 3, (1,), generator=generator)) :] = -1
    return ids_BT


@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("rows", "length", "mean"), SHAPES)
def test_the_block_mask_is_the_one_that_torch_makes(rows: int, length: int, mean: int, padding: bool) -> None:
    ids_BT = rows_of_documents(rows, length, mean, padding)
    apart = torch.where(ids_BT < 0, -1 - torch.arange(length) // _FLEX_BLOCK, ids_BT)

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (apart[b, q] == apart[b, k])

    expected = create_block_mask(visible, rows, None, length, length, device="cpu")
    found = block_mask(ids_BT)
    for which in ("kv", "full_kv", "q", "full_q"):
        counts, theirs = (getattr(mask, f"{which}_num_blocks") for mask in (found, expected))
        assert torch.equal(counts, theirs)
        indices, theirs = (getattr(mask, f"{which}_indices") for mask in (found, expected))
        there = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[there], theirs[there])
    assert found.seq_lengths == expected.seq_lengths
    q, k = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    for b in range(rows):
        assert torch.equal(found.mask_mod(b, 0, q, k), visible(b, 0, q, k))


def test_no_engine_sets_the_kernels_of_attention_for_the_others() -> None:
    """Torch keeps their order once for a process, also where a context manager sets it and sets it back."""
    sources = Path(attention.__file__).parents[1].rglob("*.py")
    assert not [path for path in sources if re.search(r"sdpa_kernel|_set_sdp|enable_\w+_sdp\b", path.read_text())]

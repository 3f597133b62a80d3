"""Which positions of a row see each other.

Guarantees:
- A position sees itself and the earlier positions of its own document, nothing else.
- Rows of one document each need no mask: padding comes last, so plain causal attention is right for them.
- Rows of several documents take a dense additive mask on a CPU and a block mask of flex attention on a GPU, where no
  ``[T, T]`` tensor exists.
- Nothing here waits for the device: the kind of mask is decided from tensors on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    Mask = Tensor | BlockMask

_FLEX_BLOCK = 128  # positions of a flex attention block, its default


def one_document_a_row(document_ids_BT: Tensor) -> bool:
    """Whether every row holds one document from its start (padding, id -1, may follow). Reads the tensor."""
    return bool(((document_ids_BT == document_ids_BT[:, :1]) | (document_ids_BT < 0)).all())


def document_mask(document_ids_BT: Tensor, dtype: torch.dtype) -> Mask:
    """The mask of packed rows, on the device of ``document_ids_BT``."""
    return block_mask(document_ids_BT) if document_ids_BT.is_cuda else _dense_mask(document_ids_BT, dtype)


def _dense_mask(document_ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
    length = document_ids_BT.shape[1]
    same_BTT = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    visible_BTT = same_BTT & torch.ones(length, length, dtype=torch.bool, device=document_ids_BT.device).tril()
    mask_BTT = torch.zeros(visible_BTT.shape, dtype=dtype, device=document_ids_BT.device)
    return mask_BTT.masked_fill_(~visible_BTT, float("-inf"))[:, None]


def block_mask(document_ids_BT: Tensor) -> BlockMask:
    """The mask for flex attention. Each document must be one stretch of its row.

    Which blocks a block sees follows from where documents start, so nothing of size ``[T, T]`` is computed, and no
    kernel is compiled for it: torch's own ``create_block_mask`` sorts the blocks of a row, and for 128 of them the
    kernel that its compiler makes of that sort takes ptxas minutes.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = document_ids_BT.shape[1]
    at_T = torch.arange(length, device=document_ids_BT.device)
    ids_BT = torch.where(document_ids_BT < 0, -1 - at_T // _FLEX_BLOCK, document_ids_BT)  # padding: a block's work each
    begins_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    start_BT = torch.where(begins_BT, at_T, 0).cummax(dim=1).values.int()

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (k >= start_BT[b, q])

    own_N = torch.arange(-(-length // _FLEX_BLOCK), device=document_ids_BT.device)
    last_N = ((own_N + 1) * _FLEX_BLOCK - 1).clamp(max=length - 1)
    first_BN = start_BT[:, own_N * _FLEX_BLOCK] // _FLEX_BLOCK  # the first block that any of a block's positions sees
    whole_BN = -(-start_BT[:, last_N] // _FLEX_BLOCK)  # the first one that all of them see whole, if it is before it
    whole_BN = torch.minimum(whole_BN, own_N)
    before_BN = whole_BN - first_BN
    seen_BNN = first_BN[:, :, None] + own_N
    partial_BNN = torch.where(own_N < before_BN[:, :, None], seen_BNN, own_N[:, None])
    full_BNN = (whole_BN[:, :, None] + own_N).clamp(max=len(own_N) - 1)
    counts = (before_BN + 1, partial_BNN, own_N - whole_BN, full_BNN)
    partial, indices, full, full_indices = (x[:, None].int().contiguous() for x in counts)
    return BlockMask.from_kv_blocks(
        partial, indices, full, full_indices, _FLEX_BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )

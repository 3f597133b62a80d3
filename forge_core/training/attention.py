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
    """The mask for flex attention."""
    from forge_core.training.attention_kernels import create_compiled_block_mask

    rows, length = document_ids_BT.shape
    blocks_T = torch.arange(length, device=document_ids_BT.device) // _FLEX_BLOCK
    ids_BT = torch.where(document_ids_BT < 0, -1 - blocks_T, document_ids_BT).int()  # padding: one block's work each

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids_BT[b, q] == ids_BT[b, k])

    return create_compiled_block_mask(visible, rows, None, length, length, device=document_ids_BT.device)

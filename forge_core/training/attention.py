"""Which positions of a row see each other, and the kernel that computes attention over them.

Guarantees:
- A position sees itself and the earlier positions of its own document, nothing else.
- Rows of one document each need no mask: padding comes last, so plain causal attention is right for them.
- Rows of several documents take a dense additive mask on a CPU and a block mask of flex attention on a GPU, where no
  ``[T, T]`` tensor exists.
- Nothing here waits for the device: the kind of mask is decided from tensors on the CPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    Mask = Tensor | BlockMask

_FLEX_BLOCK = 128  # positions of a flex attention block, its default
_GPU_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def one_document_a_row(document_ids_BT: Tensor | None) -> bool:
    """Whether every row holds one document from its start (padding, id -1, may follow). Reads the tensor."""
    return document_ids_BT is None or bool(((document_ids_BT == document_ids_BT[:, :1]) | (document_ids_BT < 0)).all())


def document_mask(document_ids_BT: Tensor, dtype: torch.dtype) -> Mask:
    """The mask of packed rows, on the device of ``document_ids_BT``."""
    return _block_mask(document_ids_BT) if document_ids_BT.is_cuda else _dense_mask(document_ids_BT, dtype)


def attend(
    q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, mask: Mask | None, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Causal attention under ``mask``, ``[B, L, N, H]``."""
    q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    if mask is not None and not isinstance(mask, Tensor):
        return _flex()(q_BNLH, k_BNLH, v_BNLH, block_mask=mask, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)
    with sdpa_kernel(_GPU_KERNELS, set_priority=True) if q_BLNH.is_cuda else nullcontext():
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
    return out_BNLH.transpose(1, 2)


def _dense_mask(document_ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
    length = document_ids_BT.shape[1]
    same_BTT = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    visible_BTT = same_BTT & torch.ones(length, length, dtype=torch.bool, device=document_ids_BT.device).tril()
    mask_BTT = torch.zeros(visible_BTT.shape, dtype=dtype, device=document_ids_BT.device)
    return mask_BTT.masked_fill_(~visible_BTT, float("-inf"))[:, None]


def _block_mask(document_ids_BT: Tensor) -> BlockMask:
    rows, length = document_ids_BT.shape
    blocks_T = torch.arange(length, device=document_ids_BT.device) // _FLEX_BLOCK
    ids_BT = torch.where(document_ids_BT < 0, -1 - blocks_T, document_ids_BT).int()  # padding: one block's work each

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids_BT[b, q] == ids_BT[b, k])

    return _create_block_mask()(visible, rows, None, length, length, device=document_ids_BT.device)


@cache
def _create_block_mask() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)

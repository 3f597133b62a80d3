"""The kernels that compute attention under the masks of ``attention.py``.

Importing this file imports torch's compiler (a second or two); what is compiled is compiled at its first use. The
compiled functions are made here, once, because a layer that is compiled itself must find them as they are.

Which of torch's kernels computes plain causal attention is torch's choice (cuDNN's on Hopper and Blackwell, flash
attention elsewhere). Its order belongs to the process: engines work in threads of one, and one that set it for a call
would set it for all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_compiled_flex = torch.compile(flex_attention, dynamic=False)


def attend(
    q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, mask: Tensor | BlockMask | None, scale: float | None, gqa: bool
) -> Tensor:
    """Causal attention under ``mask``, ``[B, L, N, H]``."""
    q_BNLH, k_BNLH, v_BNLH = q_BLNH.transpose(1, 2), k_BLNH.transpose(1, 2), v_BLNH.transpose(1, 2)
    if isinstance(mask, BlockMask):
        return _compiled_flex(q_BNLH, k_BNLH, v_BNLH, block_mask=mask, scale=scale, enable_gqa=gqa).transpose(1, 2)
    out_BNLH = F.scaled_dot_product_attention(
        q_BNLH, k_BNLH, v_BNLH, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out_BNLH.transpose(1, 2)

"""The model, by torchtitan's code (0.3.0). This file and ``titan_parallel.py`` are all that know its internals.

Guarantees:
- Importing it works on torch 2.11 to 2.14, with or without a GPU and Triton, whatever was imported before.
- One model class computes every supported architecture; with equal weights its logits equal those of ``transformers``.

Importing costs about 3 s on top of torch (torchtitan's attention imports torch's compiler), so callers import this file
inside ``setup``.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial

from forge_core.training.architecture import Architecture, inverse_frequencies
from forge_core.training.attention_kernels import attend
from forge_core.training.logprob_head import Vocabulary, target_logprobs


def _prepare_import() -> None:
    """What must hold before torchtitan is imported."""
    import torchtitan.tools.utils as titan_utils

    if not torch.cuda.is_available():  # torchtitan falls back to "cuda", which breaks meshes on a CPU
        titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu
    if not hasattr(fsdp, "DataParallelMeshDims"):  # torch 2.11: named at import, used by backends we do not use
        setattr(fsdp, "DataParallelMeshDims", type("DataParallelMeshDims", (), {}))  # noqa: B010 (a type to mypy)
    if importlib.util.find_spec("triton") is None:  # only this expert-parallel dispatcher imports it, at import
        name = "torchtitan.distributed.minimal_async_ep"
        absent = types.ModuleType(name)
        for needed in ("combine_op", "dispatch_op", "init_buffer", "MinimalAsyncEPDispatchMetadata"):
            setattr(absent, needed, type(needed, (), {}))
        sys.modules.setdefault(name, absent)


_prepare_import()

from torchtitan.models.common import CosSinRoPE, Embedding, Linear  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.models.common.param_init import skip_param_init  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

_NO_INIT = {"weight": skip_param_init, "bias": skip_param_init}  # weights always come from a model folder


@dataclass(frozen=True)
class HeadQuery:
    """Ask the model for log-probabilities instead of logits.

    ``index_N`` are flat positions in ``[B * T]``, ``target_N`` the token each of them predicts.
    """

    index_N: Tensor
    target_N: Tensor
    temperature: float


class LogprobHead(Linear):
    """The output matrix. It lives in ``lm_head`` so that FSDP gathers and frees it like any other layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    _group: ProcessGroup | None = None  # of the ranks that share the vocabulary

    def parallelize(self, parallel_dims: Any) -> None:
        mesh = parallel_dims.get_optional_mesh("tp")
        self._group = None if mesh is None else mesh.get_group()
        super().parallelize(parallel_dims)

    def forward(self, input: Tensor, query: HeadQuery | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if query is None:
            return super().forward(input)
        weight_VD, vocabulary = self.weight, None
        if isinstance(weight_VD, DTensor):
            weight_VD = weight_VD.to_local()
        if self._group is not None:
            vocabulary = Vocabulary.part(self._group, self.out_features)
            assert isinstance(input, DTensor)  # each rank's vocabulary adds its part to the gradient
            input = input.to_local(grad_placements=[Partial()])
        hidden_ND = input.flatten(0, 1)[query.index_N]
        return target_logprobs(hidden_ND, weight_VD, query.target_N, query.temperature, vocabulary)


class PolicyModel(Qwen3Model):
    """torchtitan's dense decoder with a log-probability head."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: Any = None,
        query: HeadQuery | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``[B, T]`` tokens -> logits ``[B, T, V]``, or (log-probabilities, entropies) ``[N]`` of ``query``.

        A pipeline stage takes and gives hidden states ``[B, T, D]``, except at the ends.
        """
        h_BTD = tokens if self.tok_embeddings is None else _arrived(self.tok_embeddings(tokens))
        for layer in self.layers.values():
            h_BTD = layer(h_BTD, attention_masks, positions)
        return h_BTD if self.lm_head is None else self.lm_head(self.norm(h_BTD), query)


def _arrived(tensor: Tensor) -> Tensor:
    """Wait for a divided tensor's collective: compiled layers want the same kind of tensor each time."""
    if isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, AsyncCollectiveTensor):
        tensor._local_tensor = tensor._local_tensor.wait()
    return tensor


class MaskedAttention(Module):
    """Attention between the documents' own tokens (``attention_kernels.attend``).

    Argument names are part of the contract: torchtitan shards by name under tensor parallelism.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return attend(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale, enable_gqa)


class FrequencyRoPE(CosSinRoPE):
    """Rotary embedding in the rotate-half convention of Hugging Face weights, from given frequencies."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        frequencies: tuple[float, ...]

    def _precompute_cache(self) -> Tensor:
        frequencies = torch.tensor(self.config.frequencies, dtype=torch.float32)
        angles = torch.outer(torch.arange(self.config.max_seq_len, dtype=torch.float32), frequencies)
        return torch.cat([angles.cos()] * 2 + [angles.sin()] * 2, dim=-1)


def model_config(arch: Architecture, seq_len: int) -> PolicyModel.Config:
    """torchtitan's configuration of ``arch`` for documents of at most ``seq_len`` tokens."""
    return PolicyModel.Config(
        vocab_size=arch.vocab_size,
        dim=arch.dim,
        norm=_norm(arch, arch.dim),
        enable_weight_tying=arch.tied,
        tok_embeddings=Embedding.Config(num_embeddings=arch.vocab_size, embedding_dim=arch.dim, param_init=_NO_INIT),
        lm_head=LogprobHead.Config(in_features=arch.dim, out_features=arch.vocab_size, param_init=_NO_INIT),
        layers=[_layer(arch, seq_len) for _ in range(arch.n_layers)],
    )


def _layer(arch: Architecture, seq_len: int) -> Qwen3TransformerBlock.Config:
    frequencies = tuple(inverse_frequencies(arch).tolist())
    attention = make_gqa_config(
        dim=arch.dim,
        n_heads=arch.n_heads,
        n_kv_heads=arch.n_kv_heads,
        head_dim=arch.head_dim,
        wqkv_param_init=_NO_INIT,
        wo_param_init=_NO_INIT,
        inner_attention=MaskedAttention.Config(),
        rope=FrequencyRoPE.Config(dim=arch.head_dim, max_seq_len=seq_len, frequencies=frequencies),
        fuse_qkv=False,  # separate matrices map one-to-one to Hugging Face tensors; no speed difference was measured
        qk_norm=_norm(arch, arch.head_dim) if arch.qk_norm else None,
    )
    attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = arch.qkv_bias
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(arch, arch.dim),
        ffn_norm=_norm(arch, arch.dim),
        attention=attention,
        feed_forward=make_ffn_config(
            dim=arch.dim, hidden_dim=arch.hidden_dim, w1_param_init=_NO_INIT, w2w3_param_init=_NO_INIT
        ),
    )


def _norm(arch: Architecture, width: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=arch.norm_eps, param_init=_NO_INIT)

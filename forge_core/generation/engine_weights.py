"""Weights on their way into a vLLM engine: checked before they are handed over, because vLLM checks nothing.

A folder with a wrong name or shape leaves vLLM's parameters half loaded, and the engine dies at its next step; so every
name, shape and type is compared with those the engine was started on *before* the swap.

On a CPU vLLM keeps a packed copy of a tied output matrix that no reload reaches: it would go on sampling with old
weights. There the engine is given an untied view of the folder, with the embedding as its own ``lm_head.weight``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge_core.models.errors import WeightsError
from forge_core.models.resolve import HEAD, INDEX_FILE, read_json
from forge_core.models.weights import EMBEDDING

Signature = dict[str, tuple[str, tuple[int, ...]]]


def signature(folder: Path) -> Signature:
    """Type and shape of every tensor, from the headers alone. WeightsError for a file that is no safetensors."""
    from safetensors import SafetensorError, safe_open

    found: Signature = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    part = file.get_slice(name)
                    found[name] = (part.get_dtype(), tuple(part.get_shape()))
        except SafetensorError as error:
            raise WeightsError(f"{path} is not a whole safetensors file: {error}") from error
    if not found:
        raise WeightsError(f"{folder} holds no weights (*.safetensors)")
    return found


def check_same(folder: Path, wanted: Signature) -> None:
    """Raise WeightsError, naming tensors, unless ``folder`` has exactly the tensors of ``wanted``."""
    found = signature(folder)
    different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if different:
        first = different[0]
        raise WeightsError(
            f"{folder}: {len(different)} tensors are not those that the engine serves, such as {first}: "
            f"{found.get(first, 'missing')} instead of {wanted.get(first, 'none')}; the old version keeps serving"
        )


def is_tied(folder: Path) -> bool:
    return bool(read_json(folder / "config.json").get("tie_word_embeddings", False))


def untied_view(folder: Path, view: Path) -> Path:
    """Make ``view``: the model of ``folder`` with its tied output matrix written out. Files are linked, not copied."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    view.mkdir(parents=True)
    sources = sorted(folder.glob("*.safetensors"))
    weight_map: dict[str, str] = {}
    for path in folder.iterdir():
        if path.name not in ("config.json", INDEX_FILE):
            (view / path.name).symlink_to(path.resolve())
    for path in sources:
        with safe_open(path, framework="pt") as file:
            weight_map |= {name: path.name for name in file.keys() if name != HEAD}  # noqa: SIM118
            if EMBEDDING in file.keys():  # noqa: SIM118
                save_file({HEAD: file.get_tensor(EMBEDDING)}, view / "lm_head.safetensors", metadata={"format": "pt"})
    weight_map[HEAD] = "lm_head.safetensors"
    _write(view / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
    _write(view / "config.json", {**read_json(folder / "config.json"), "tie_word_embeddings": False})
    return view


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))

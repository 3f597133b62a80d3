"""From what a configuration calls a model to a checked local folder.

Invariants:
- A local path wins over a hub id; ``hf://org/name`` is always a hub id.
- The hub's cache is used before the network, so a model fetched once needs no network again.
- A folder that is returned has a readable ``config.json`` of a supported architecture, safetensors (every shard of
  an index) and a tokenizer. Nothing here imports torch or transformers, so a bad model is refused at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge_core.models.errors import ModelError

Check = Callable[[Path], Path]  # returns its folder or raises ModelError
SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HEAD = "lm_head.weight"  # left out of the files when it is the input embedding too
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")  # endings of the files of a run's version
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]


def resolve_model(model: str) -> Path:
    """The local folder of ``model``: a path, ``org/name`` or ``hf://org/name``. Raises ModelError."""
    return _resolved(model, HUB_FILES, check_model_folder)


def resolve_sizes(model: str) -> Path:
    """A local folder with the ``config.json`` of ``model``; no more is fetched from the hub. Raises ModelError."""
    return _resolved(model, ["config.json"], check_architecture)


def _resolved(model: str, files: list[str], check: Check) -> Path:
    if model.startswith("hf://"):
        return _from_hub(model.removeprefix("hf://"), files, check)
    folder = Path(model).expanduser()
    if folder.is_file():
        raise ModelError(f"model {model!r} is a file: give a folder (a .gguf file is converted with gguf_to_hf first)")
    if folder.exists():
        return check(folder)
    if model.count("/") != 1 or model.startswith((".", "/", "~")) or model.endswith("/"):
        raise ModelError(f"model {model!r}: no such folder, and not a hub id (org/name or hf://org/name)")
    return _from_hub(model, files, check)


def check_model_folder(folder: Path) -> Path:
    """``folder``, when it holds a model that Forge can load; else ModelError saying what is missing."""
    check_architecture(folder)
    for file in weight_files(folder):
        if not file.exists():
            raise ModelError(f"model folder {folder} lacks {file.name}: download or export the model again")
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model folder {folder} has no tokenizer (tokenizer.json): save it there with "
            "AutoTokenizer.from_pretrained(<base model>).save_pretrained(<folder>)"
        )
    return folder


def check_architecture(folder: Path) -> Path:
    """``folder``, when its ``config.json`` names an architecture that Forge supports; else ModelError."""
    architecture = model_architecture(folder)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{folder / 'config.json'}: architecture {architecture} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return folder


def model_architecture(folder: Path) -> str:
    """The architecture that ``config.json`` names (its first, or "none")."""
    path = folder / "config.json"
    if not path.exists():
        raise ModelError(f"model folder {folder} has no config.json: give the folder of a Hugging Face model")
    names = read_json(path).get("architectures") or ["none"]
    return str(names[0])


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, as its index lists them (they need not exist), sorted by name."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise ModelError(
                f"model folder {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: "
                "only safetensors are read; convert other formats with save_pretrained"
            )
        return [folder / SINGLE_FILE]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{index}: no weight_map; export the model again")
    return [folder / name for name in sorted(set(shards.values()))]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; ModelError names the file when it is not one."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}): download or export the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object: download or export the model again")
    return value


def _from_hub(repository: str, files: list[str], check: Check) -> Path:
    if not repository:
        raise ModelError("Empty repository name: write hf://org/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = snapshot_download(repository, allow_patterns=files, local_files_only=True)
        return check(Path(cached))
    except HFValidationError as error:
        raise ModelError(f"{repository!r} is not a hub id: write org/name or hf://org/name") from error
    except (LocalEntryNotFoundError, ModelError):
        pass  # not in the cache, or only a part of it: the download below completes it or says why not
    return check(_download(repository, files, check))


def _download(repository: str, files: list[str], check: Check) -> Path:
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE:
        raise ModelError(_missing_offline(repository, check))
    try:
        return Path(snapshot_download(repository, allow_patterns=files))
    except GatedRepoError as error:
        raise ModelError(
            f"model {repository!r} is gated on the hub: accept its terms at {constants.ENDPOINT}/{repository} and set "
            "HF_TOKEN to a token that may read it, or give a local folder"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
        raise ModelError(
            f"model {repository!r} is no local folder and could not be fetched from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}): check the name, "
            "the network and HF_TOKEN, or give a local folder"
        ) from error


def _missing_offline(repository: str, check: Check) -> str:
    """What the hub's cache lacks of a model that may not be fetched now."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    missing = f"there is no {folder}"
    for snapshot in sorted(folder.glob("snapshots/*")):
        try:
            check(snapshot)
        except ModelError as error:
            missing = str(error)
    return (
        f"model {repository!r}: it could not be fetched, since offline mode is on (HF_HUB_OFFLINE), and the cache "
        f"lacks it: {missing}. Fetch it while online, or give a local folder"
    )

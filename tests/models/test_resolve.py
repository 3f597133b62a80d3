"""Finding a model's folder, and saying clearly why one cannot be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from forge_core.models.errors import ModelError
from forge_core.models.resolve import check_model_folder, resolve_model, resolve_sizes


def make_folder(folder: Path, architecture: str = "Qwen3ForCausalLM") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty hub cache, and no network."""
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def cached(hub: Path, name: str) -> Path:
    """Where the hub's cache keeps revision ``main`` of a model."""
    root = hub / ("models--" + name.replace("/", "--"))
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    return root / "snapshots" / ("0" * 40)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
def test_a_local_folder_is_itself(architecture, tmp_path):
    folder = make_folder(tmp_path / "model", architecture)
    assert resolve_model(str(folder)) == folder


def test_a_local_folder_wins_over_a_hub_id(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "org" / "name")
    assert resolve_model("org/name") == Path("org/name")
    with pytest.raises(ModelError, match="could not be fetched"):
        resolve_model("hf://org/name")


@pytest.mark.parametrize("model", ["org/name", "hf://org/name"])
def test_a_hub_id_comes_from_the_cache_without_network(model, hub):
    folder = make_folder(cached(hub, "org/name"))
    assert resolve_model(model) == folder


def test_the_sizes_of_a_hub_model_need_no_weights(hub):
    folder = make_folder(cached(hub, "org/name"))
    for file in ("model.safetensors", "tokenizer.json"):
        (folder / file).unlink()
    assert resolve_sizes("org/name") == folder
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match="GPT2LMHeadModel is not supported"):
        resolve_sizes("hf://org/name")


@pytest.mark.parametrize("partial", [True, False])
def test_a_model_that_cannot_be_fetched_names_the_remedies(partial, hub):
    if partial:
        (make_folder(cached(hub, "org/name")) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"'org/name'|model.safetensors"):
        resolve_model("org/name")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("hf://", "Empty repository name"),
        ("hf://a/b/c", "not a hub id"),
        ("/no/such/folder", "no such folder"),
        ("./missing", "no such folder"),
        ("missing", "no such folder"),
        ("a/b/c", "no such folder"),
    ],
)
def test_a_name_that_means_nothing_is_refused(model, message, hub):
    with pytest.raises(ModelError, match=message):
        resolve_model(model)


def test_a_gguf_file_is_answered_with_the_conversion(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="gguf_to_hf"):
        resolve_model(str(file))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(missing, message, tmp_path):
    folder = make_folder(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=message):
        check_model_folder(folder)


def test_an_index_whose_shard_is_missing_names_the_shard(tmp_path):
    folder = make_folder(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks model-2.safetensors"):
        check_model_folder(folder)


def test_an_unsupported_architecture_lists_the_supported_ones(tmp_path):
    folder = make_folder(tmp_path, "GPT2LMHeadModel")
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel is not supported; supported: Qwen3ForCausalLM, Qwen2"):
        check_model_folder(folder)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_names_the_file(text, tmp_path):
    folder = make_folder(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        check_model_folder(folder)


def test_looking_at_a_folder_loads_no_engine(tmp_path):
    code = (
        "import sys; from pathlib import Path; from forge_core.models import check_model_folder;"
        f"check_model_folder(Path({str(make_folder(tmp_path))!r}));"
        "print(sorted({'torch', 'transformers', 'torchtitan'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


CONFIG = json.dumps({"architectures": ["Qwen3ForCausalLM"]}).encode()
COMMIT = "a" * 40


class SmallHub(BaseHTTPRequestHandler):
    """What the hub answers about one model of three files; ``asked`` collects the files that were asked for."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.asked.append(self.path.rpartition("/")[2])
        self._answer(CONFIG, {"ETag": '"e"', "X-Repo-Commit": COMMIT}, body=False)

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            self.asked.append(self.path.rpartition("/")[2])
            return self._answer(CONFIG, {"ETag": '"e"', "X-Repo-Commit": COMMIT})
        files = [{"rfilename": n, "type": "file", "path": n, "size": len(CONFIG), "oid": "e"} for n in FILES]
        listed: Any = files if "/tree/" in self.path else {"id": "org/name", "sha": COMMIT, "siblings": files}
        return self._answer(json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _answer(self, text: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


FILES = ("config.json", "model.safetensors", "tokenizer.json")


def test_of_a_hub_model_only_the_configuration_is_downloaded_for_its_sizes(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), SmallHub)
    Thread(target=server.serve_forever, daemon=True).start()
    hub = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    listing = "print(sorted(f.name for f in resolve_sizes('org/name').iterdir()))"
    code = f"from forge_core.models.resolve import resolve_sizes; {listing}"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **hub}, capture_output=True, text=True)
    server.shutdown()
    server.server_close()
    assert done.stdout == "['config.json']\n", done.stderr
    assert set(SmallHub.asked) == {"config.json"}

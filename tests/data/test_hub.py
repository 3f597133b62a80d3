"""Sets of the hub and of ``datasets`` folders. A local server stands where the hub is, and answers as it does."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from forge_core.config.data_sections import DatasetSection
from forge_core.data import DataError, check_dataset, load_prompts, split_holdout
from forge_core.data.hub import STREAMED_ROWS

ROWS = [{"question": f"{i}+1?", "answer": f"easy\n#### {i + 1}"} for i in range(50)]


class _Refusing(BaseHTTPRequestHandler):
    """The hub's answers for a set that is gated and for one that does not exist."""

    def do_HEAD(self) -> None:
        gated = "gated" in self.path
        self.send_response(401 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    point_to(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()
    thread.join()


def point_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("path", ["forge-test/gated-set", "hf://forge-test/gated-set"])
def test_a_gated_set_says_how_to_get_access(hub: None, path: str):
    for call in (lambda s: load_prompts(s, seed=0), check_dataset):
        with pytest.raises(
            DataError,
            match=r"dataset\.path: .*is a gated dataset on the Hub.*terms at http://127.*/gated-set and set HF_TOKEN",
        ):
            call(DatasetSection(path=path))


def test_a_set_that_does_not_exist_is_named(hub: None):
    with pytest.raises(DataError, match=r"dataset\.path: .*'forge-test/none' doesn't exist.*Check the spelling"):
        check_dataset(DatasetSection(path="forge-test/none"))


def test_an_unreachable_hub_is_noticed_in_seconds(monkeypatch: pytest.MonkeyPatch):
    point_to(monkeypatch, "http://127.0.0.1:9")
    start = time.monotonic()
    for call in (lambda s: load_prompts(s, seed=0), check_dataset):
        with pytest.raises(DataError, match=r"no local file or folder 'forge-test/some'.*cannot be reached.*HF_TOKEN"):
            call(DatasetSection(path="forge-test/some"))
    assert time.monotonic() - start < 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of data files, as a hub snapshot is."""
    data = tmp_path / "snapshot" / "data"
    data.mkdir(parents=True)
    (data / "train-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (data / "test-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    return tmp_path / "snapshot"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_data_files_has_its_splits(folder: Path, streaming: bool):
    section = DatasetSection(path=str(folder), streaming=streaming)
    prompts = load_prompts(section, seed=0)
    assert [p.target for p in prompts] == [str(i + 1) for i in range(50)]
    assert len(load_prompts(section.model_copy(update={"split": "test"}), seed=0)) == 3
    check_dataset(section)


def test_a_streamed_set_gives_the_same_prompts_and_hold_out_as_a_downloaded_one(folder: Path):
    sets = [load_prompts(DatasetSection(path=str(folder), streaming=s), seed=0) for s in (False, True)]
    assert list(sets[0]) == list(sets[1])
    assert split_holdout(sets[0], 0.2) == split_holdout(sets[1], 0.2)


def test_a_streamed_set_is_read_up_to_its_size(folder: Path, caplog: pytest.LogCaptureFixture):
    prompts = load_prompts(DatasetSection(path=str(folder), streaming=True, size=7), seed=0)
    assert [p.target for p in prompts] == [str(i + 1) for i in range(7)]
    many = folder / "data" / "train-00000.jsonl"
    many.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(STREAMED_ROWS + 5)))
    with caplog.at_level(logging.WARNING):
        assert len(load_prompts(DatasetSection(path=str(folder), streaming=True), seed=0)) == STREAMED_ROWS
    assert "set dataset.size to use more" in caplog.text


def test_an_unknown_split_lists_those_there_are(folder: Path):
    with pytest.raises(DataError, match=r"dataset\.split: .*train.*test"):
        load_prompts(DatasetSection(path=str(folder), split="validation"), seed=0)


def test_a_folder_that_datasets_saved_is_loaded(tmp_path: Path):
    import datasets

    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS).shuffle(seed=1).select(range(20))})
    saved.save_to_disk(str(tmp_path / "dict"))
    saved["train"].save_to_disk(str(tmp_path / "one"))
    expected = [row["answer"].split("#### ")[1] for row in saved["train"]]
    for name in ("dict", "one"):
        assert [p.target for p in load_prompts(DatasetSection(path=str(tmp_path / name)), seed=0)] == expected
    with pytest.raises(DataError, match=r"dataset\.split: .* no split 'test'; it has train"):
        check_dataset(DatasetSection(path=str(tmp_path / "dict"), split="test"))
    assert len(load_prompts(DatasetSection(path=str(tmp_path / "dict"), size=5), seed=0)) == 5


def test_a_folder_without_data_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"dataset\.path: could not read the files of"):
        load_prompts(DatasetSection(path=str(tmp_path)), seed=0)


def test_a_gated_model_says_where_to_accept_its_terms(hub: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from huggingface_hub import constants

    from forge_core.models.errors import ModelError
    from forge_core.models.resolve import resolve_model

    endpoint = datasets_endpoint()
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=rf"'forge-test/gated' is gated.*accept its terms at {endpoint}/forge-test/gated "
    ):
        resolve_model("forge-test/gated")


def test_offline_what_is_missing_is_named_with_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import datasets
    from huggingface_hub import constants

    from forge_core.models.errors import ModelError
    from forge_core.models.resolve import resolve_model

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for streaming in (False, True):
        section = DatasetSection(path="forge-test/set", streaming=streaming)
        with pytest.raises(
            DataError, match=rf"offline mode is on \(HF_HUB_OFFLINE\).*no usable {tmp_path}/forge-test___set"
        ):
            load_prompts(section, seed=0)
    with pytest.raises(ModelError, match=rf"HF_HUB_OFFLINE.*there is no {tmp_path}/models--forge-test--m\."):
        resolve_model("forge-test/m")
    snapshot = tmp_path / "models--forge-test--m" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        resolve_model("forge-test/m")


def datasets_endpoint() -> str:
    import datasets

    return datasets.config.HF_ENDPOINT

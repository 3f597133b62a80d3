"""What is wrong with the data of a supervised run is named."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from forge_core.data import DataError
from forge_core.data.loader import check_sft_data
from forge_core.data.sft_settings import SftDataConfig
from forge_core.data.sft_sources import open_documents
from tests.data.loaders import loader, section


def test_a_set_without_a_usable_document_is_an_error_and_no_endless_loop(files: Path):
    settings = SftDataConfig(path=str(files / "long.jsonl"), truncation="drop")
    with pytest.raises(DataError, match=r"dataset: no document can be used: \d+ of long_train too_long"):
        next(loader(settings, seq_len=8))
    with pytest.raises(DataError, match=r"dataset\.holdout: every document of long_train is held out"):
        next(loader(SftDataConfig(path=str(files / "long.jsonl"), holdout=0.9999999)))


def test_an_error_in_a_row_names_the_row(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": ""}\n')
    with pytest.raises(DataError, match=r"dataset: row 1, completion: holds ''"):
        list(islice(loader(SftDataConfig(path=str(tmp_path / "x.jsonl"))), 2))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [("x.jsonl", '{"text": "a"}\n{"text": \n'), ("x.parquet", "no such thing"), ("x.jsonl", "")],
)
def test_a_file_that_cannot_be_read_is_named_whether_it_is_streamed_or_not(
    tmp_path: Path, name: str, content: str, streaming: bool
):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"dataset\.path: .*{name}"):
        list(islice(loader(SftDataConfig(path=str(tmp_path / name), streaming=streaming)), 2))


def test_a_stream_that_breaks_far_behind_its_beginning_says_where(tmp_path: Path):
    row = '{"text": "' + "a" * 2000 + '"}\n'
    (tmp_path / "x.jsonl").write_text(row * 12_000 + "{broken\n")  # in the third part that is parsed at once
    one = open_documents(SftDataConfig(path=str(tmp_path / "x.jsonl"), streaming=True), 0, "dataset")
    with pytest.raises(DataError, match=r"dataset\.path: x_train cannot be read behind row \d+ of its epoch"):
        [one.draw() for _ in range(12_001)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "none.jsonl"}, r"dataset\.path: there is no file or folder 'none.jsonl'"),
        ({"path": "none.jsonl", "streaming": True}, r"dataset\.path: there is no file or folder 'none.jsonl'"),
        ({"path": "no*.jsonl", "streaming": True}, r"dataset\.path: no file matches"),
        ({"mixture": [{"path": "{files}/long.jsonl"}, {"path": "x.csv"}]}, r"dataset\.mixture\.1\.path: there is no"),
        ({"path": "{files}/long.jsonl", "format": "alpaca"}, r"dataset\.columns: the format alpaca needs instruction"),
        ({"path": "python://json:loads", "streaming": True}, r"dataset\.streaming: python://json:loads makes its rows"),
        ({"path": "python://json:nothing"}, r"dataset\.path: python://.*has no 'nothing'"),
    ],
)
def test_what_is_wrong_with_a_set_is_said_before_a_model_is_loaded(files: Path, fields: dict, message: str):
    written = json.loads(json.dumps(fields).replace("{files}", str(files)))
    with pytest.raises(DataError, match=message):
        check_sft_data(SftDataConfig(**written))


def test_sets_that_are_right_pass_the_check(files: Path):
    for streaming in (False, True):
        check_sft_data(section(files, streaming=streaming))
    check_sft_data(SftDataConfig(path="reasoning_gym://chain_sum", options={"size": 3}))

"""Prompts from local files and folders, with the errors a user meets."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_core.config import load_config
from forge_core.config.data_sections import DatasetSection
from forge_core.data import DataError, check_dataset, load_prompts
from forge_core.data.sft_settings import SftDataConfig
from forge_core.data.sft_sources import check_sft_data
from forge_core.runs.checks import check_run
from tests.runs.harness import TINY

ROWS = [
    {"prompt": "2 + 2 =", "answer": "4", "level": 1},
    {"prompt": "3 + 9 =", "answer": "12", "level": 2},
    {"prompt": "7 - 8 =", "answer": "-1", "level": 1},
]


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def load(path: Path, **fields):
    return load_prompts(DatasetSection(path=str(path), **fields), seed=0)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_every_file_type_gives_the_same_prompts(tmp_path: Path, suffix: str):
    prompts = load(write(tmp_path / f"sums{suffix}", ROWS))
    assert [p.messages for p in prompts] == [[{"role": "user", "content": row["prompt"]}] for row in ROWS]
    assert [p.target for p in prompts] == ["4", "12", "-1"]
    assert [p.row for p in prompts] == [0, 1, 2]
    assert {p.task for p in prompts} == {"sums"}
    assert [int(p.metadata["level"]) for p in prompts] == [1, 2, 1]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_size_takes_the_first_rows(tmp_path: Path, suffix: str):
    prompts = load(write(tmp_path / f"sums{suffix}", ROWS), size=2)
    assert [p.target for p in prompts] == ["4", "12"]


def test_a_row_gives_the_same_prompt_each_time_and_negative_indices_count_from_the_end(tmp_path: Path):
    prompts = load(write(tmp_path / "sums.parquet", ROWS))
    assert prompts[1] == prompts[1] == list(prompts)[1]
    assert prompts[-1] == prompts[2]
    with pytest.raises(IndexError):
        prompts[3]


def test_a_large_parquet_file_is_read_row_by_row_across_row_groups(tmp_path: Path):
    table = pa.table({"prompt": [f"p{i}" for i in range(5000)], "answer": [str(i) for i in range(5000)]})
    pq.write_table(table, tmp_path / "many.parquet", row_group_size=700)
    prompts = load(tmp_path / "many.parquet", size=4000)
    assert len(prompts) == 4000
    assert prompts[3999].target == "3999"
    assert len(set(prompts.prompt_ids)) == 4000


@pytest.mark.parametrize("path", ["no/such/file.jsonl", "./missing", "/nowhere/at/all.parquet", "missing.csv"])
def test_a_missing_file_names_the_key_and_the_path(path: str):
    for call in (lambda s: load_prompts(s, seed=0), check_dataset):
        with pytest.raises(DataError, match=r"dataset\.path: there is no file or folder") as error:
            call(DatasetSection(path=path))
        assert path in str(error.value)


def test_a_missing_prompt_column_lists_the_columns_and_names_the_key(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", [{"text": "hello", "label": "1"}])
    for call in (lambda s: load_prompts(s, seed=0), check_dataset):
        with pytest.raises(DataError, match=r"dataset\.prompt_column: .*its columns are text, label: set dataset\."):
            call(DatasetSection(path=str(path)))
        with pytest.raises(DataError, match=r"dataset\.prompt_column: .* has no column 'question'"):
            call(DatasetSection(path=str(path), prompt_column="question"))


def test_a_missing_answer_column_is_an_error_when_named_or_needed(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", [{"prompt": "hello", "label": "1"}])
    with pytest.raises(DataError, match=r"dataset\.answer_column: .* no column 'truth'; its columns are prompt, label"):
        check_dataset(DatasetSection(path=str(path), answer_column="truth"))
    with pytest.raises(DataError, match=r"dataset\.answer_column: .* none of the usual columns"):
        check_dataset(DatasetSection(path=str(path)), needs_answer=True)
    assert load(path)[0].target is None
    assert load(path, answer_column="label")[0].target == "1"


def test_errors_of_another_section_name_that_section(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", [{"text": "hello"}])
    with pytest.raises(DataError, match=r"warm_start\.dataset\.prompt_column"):
        check_dataset(DatasetSection(path=str(path)), key="warm_start.dataset")


def test_an_empty_file_is_an_error(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for call in (lambda s: load_prompts(s, seed=0), check_dataset):
        with pytest.raises(DataError, match=r"dataset\.path: .* has no rows"):
            call(DatasetSection(path=str(tmp_path / "empty.jsonl")))


def test_a_broken_line_is_named(tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2 is not valid JSON"):
        load(tmp_path / "bad.jsonl")


def test_json_that_holds_no_list_of_objects_is_refused(tmp_path: Path):
    (tmp_path / "one.json").write_text('{"prompt": "a"}')
    with pytest.raises(DataError, match="must be a list of objects"):
        load(tmp_path / "one.json")
    (tmp_path / "texts.json").write_text('["a", "b"]')
    with pytest.raises(DataError, match=r"row 0 of .* rows must be objects"):
        load(tmp_path / "texts.json")


def test_an_unknown_file_type_is_refused(tmp_path: Path):
    (tmp_path / "prompts.txt").write_text("hello")
    with pytest.raises(DataError, match=r"\.jsonl, \.json, \.parquet, \.csv: convert it"):
        load(tmp_path / "prompts.txt")


@pytest.mark.parametrize("path", ["s3://bucket/x", "hf://", "gym://chain_sum"])
def test_an_unknown_kind_of_path_says_what_there_is(path: str):
    with pytest.raises(DataError, match=r"dataset\.path: .* is no data set: use a hub id"):
        check_dataset(DatasetSection(path=path))


def test_checking_a_file_reads_one_row_only(tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\nnot json\n')
    check_dataset(DatasetSection(path=str(tmp_path / "bad.jsonl")))


def test_a_column_that_json_cannot_hold_is_named(tmp_path: Path):
    path = write(tmp_path / "images.parquet", [{"prompt": "what is this?", "image": b"\x89PNG"}])
    with pytest.raises(DataError, match="column 'image' holds a bytes"):
        load(path)[0]


@pytest.mark.parametrize("path", ["rows.jsonl", "*.jsonl", "python://forge_core.data.sort_digits:prompts"])
def test_a_split_that_a_set_cannot_have_is_refused_not_taken_for_the_whole_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    with pytest.raises(DataError, match=r"dataset\.split: .* has only the split train, not 'test'"):
        load_prompts(DatasetSection(path=path, split="test"), seed=0)
    section = SftDataConfig(path=path, split="test")
    with pytest.raises(DataError, match=r"dataset\.split: .* has only the split train, not 'test'"):
        check_sft_data(section)
    with pytest.raises(DataError, match=r"eval\.split: .* has only the split train, not 'test'"):
        check_run(load_config({**TINY, "dataset": {"path": path}, "eval": {"split": "test"}}))

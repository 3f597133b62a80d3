"""Files of text mean the same whether they are read as a whole, streamed, or lie in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_core.config.data_sections import DatasetSection
from forge_core.data import DataError, load_prompts
from forge_core.data.documents import Documents
from forge_core.data.sft_settings import SftDataConfig
from forge_core.data.sft_sources import check_sft_data, open_documents
from forge_core.data.sources import read_file

PAIR = {"prompt": "a", "completion": "b"}
EVERY_WAY = pytest.mark.parametrize("streaming", [False, True])


def opened(path: Path | str, **fields: Any) -> Documents:
    return open_documents(SftDataConfig(path=str(path), **fields), 0, "dataset")


def said(path: Path | str, **fields: Any) -> list[list[str]]:
    """The contents of all messages, by row."""
    return [[m["content"] for m in drawn.example.messages] for drawn in opened(path, **fields).once()]


def lines(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@EVERY_WAY
@pytest.mark.parametrize("place", ["x/train.csv", "x"])
def test_cells_of_csv_files_are_text_whatever_they_look_like(tmp_path: Path, place: str, streaming: bool):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "train.csv").write_text(
        'prompt,completion\n"say\nhi, ""you""",007\n2,NA\nc,1.50\nd,True\ne,2024-01-02\n', newline=""
    )
    found = said(tmp_path / place, streaming=streaming)
    assert found == [['say\nhi, "you"', "007"], ["2", "NA"], ["c", "1.50"], ["d", "True"], ["e", "2024-01-02"]]


def test_answers_of_a_folder_of_csv_files_are_what_the_file_says(tmp_path: Path):
    (tmp_path / "test.csv").write_text("prompt,answer\na,007\nb,NA\n")
    prompts = load_prompts(DatasetSection(path=str(tmp_path), split="test"), seed=0)
    assert [p.target for p in prompts] == ["007", "NA"]


@EVERY_WAY
def test_texts_that_look_like_dates_and_rows_with_columns_of_their_own_stay_as_they_are(
    tmp_path: Path, streaming: bool
):
    rows = [
        {"prompt": "when", "completion": "2024-01-02"},
        {**PAIR, "note": {"x": 1}},
        {"completion": "c", "prompt": "d"},
    ]
    assert said(lines(tmp_path / "x.jsonl", *rows), streaming=streaming) == [
        ["when", "2024-01-02"],
        ["a", "b"],
        ["d", "c"],
    ]


@EVERY_WAY
def test_what_only_later_rows_have_is_found(tmp_path: Path, streaming: bool):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = lines(tmp_path / "x.jsonl", *[{"messages": talk}] * 150, {"messages": talk, "tools": [{"name": "add"}]})
    assert [drawn.example.tools for drawn in opened(file, streaming=streaming).once()] == [None] * 150 + [
        [{"name": "add"}]
    ]


def test_the_system_prompt_is_that_of_the_section_around_unless_a_set_has_its_own_or_wants_none(tmp_path: Path):
    file = str(lines(tmp_path / "x.jsonl", PAIR))
    inner = [{"path": file, "label": "inherits"}, {"path": file, "label": "none", "system_prompt": ""}]
    outer = [{"path": file, "label": "own", "system_prompt": "mine"}, {"label": "in", "mixture": inner}]
    section = SftDataConfig(mixture=outer, system_prompt="around")
    found = {d.label: d.example.messages[0]["content"] for d in open_documents(section, 0, "dataset").once()}
    assert found == {"own": "mine", "inherits": "around", "none": "a"}


@EVERY_WAY
def test_a_row_that_lacks_a_column_is_named(tmp_path: Path, streaming: bool):
    file = lines(tmp_path / "x.jsonl", PAIR, {"prompt": "c"})
    with pytest.raises(DataError, match=r"dataset: row 1, completion: holds None"):
        said(file, streaming=streaming)


def test_json_rows_of_a_folder_that_differ_in_their_columns_say_what_helps(tmp_path: Path):
    lines(tmp_path / "train.jsonl", {**PAIR, "note": 1}, PAIR)
    for streaming in (False, True):
        with pytest.raises(DataError, match=rf"some lack 'note'\).*dataset\.path='{tmp_path}/\*\*/\*\.jsonl'"):
            opened(tmp_path, streaming=streaming)
    assert said(f"{tmp_path}/**/*.jsonl") == [["a", "b"]] * 2


@EVERY_WAY
def test_the_mark_that_begins_a_file_of_some_programs_is_no_part_of_it(tmp_path: Path, streaming: bool):
    (tmp_path / "x.csv").write_text("prompt,completion\na,b\n", encoding="utf-8-sig")
    (tmp_path / "x.jsonl").write_text(json.dumps(PAIR), encoding="utf-8-sig")
    for name in ("x.csv", "x.jsonl"):
        assert said(tmp_path / name, streaming=streaming) == [["a", "b"]]


@EVERY_WAY
@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def test_unusual_characters_and_long_texts_are_read_as_they_are(tmp_path: Path, name: str, streaming: bool):
    text = "日本 👩\u200d👩\u200d👧\u2028\x85 " + "x" * 200_000
    if name == "x.jsonl":
        (tmp_path / name).write_text(json.dumps({"prompt": text, "completion": "é"}, ensure_ascii=False))
    else:
        (tmp_path / name).write_text(f'prompt,completion\n"{text}",é\n')
    assert said(tmp_path / name, streaming=streaming) == [[text, "é"]]


@EVERY_WAY
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"prompt": "é", "completion": "b"}'.encode("latin-1"), "is not UTF-8 text"),
        ("x.csv", "prompt,completion\né,b\n".encode("latin-1"), "is not UTF-8 text"),
        ("x.csv", b"prompt,completion\na,b,c\n", "line 2 has more cells than the first line"),
        ("x.csv", b"prompt,completion\na\n", "line 2 has fewer cells than the first line"),
        ("x.csv", b'prompt,completion\n"a,b\n', "is not valid CSV"),
        ("x.csv", b"prompt,completion,completion\na,b,c\n", "x.csv has the column 'completion' more than once: rename"),
        (
            "x.jsonl",
            b'{"prompt": "a", "completion": "b", "completion": "c"}',
            "line 1 has the column 'completion' more",
        ),
        ("x.json", b'[{"prompt": "a", "prompt": "b", "completion": "c"}]', "x.json has the column 'prompt' more than"),
        ("x.jsonl", rb'{"prompt": "\ud83d", "completion": "b"}', "line 1 holds half of a character"),
        ("x.jsonl", b'["a"]', "row 0 of .* is a list; rows must be objects"),
    ],
)
def test_what_is_no_text_or_no_row_is_named_with_its_file(
    tmp_path: Path, name: str, content: bytes, message: str, streaming: bool
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"dataset\.path: .*{message}"):
        check_sft_data(SftDataConfig(path=str(tmp_path / name), streaming=streaming))


@EVERY_WAY
def test_a_folder_of_csv_files_with_two_columns_of_one_name_is_refused(tmp_path: Path, streaming: bool):
    (tmp_path / "train-0.csv").write_text("prompt,completion\na,b\n")
    (tmp_path / "train-1.csv").write_text("prompt,completion,completion\na,b,c\n")
    with pytest.raises(DataError, match=r"dataset\.path: .*train-1\.csv has the column 'completion' more than once"):
        said(tmp_path, streaming=streaming)


def test_parquet_with_two_columns_of_one_name_is_refused_however_much_is_read(tmp_path: Path):
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["prompt", "answer", "answer"]), file)
    for limit in (None, 1):
        with pytest.raises(DataError, match=r"x\.parquet has the column 'answer' more than once: rename or remove"):
            read_file(file, limit, "dataset")


def test_columns_without_a_name_may_be_several(tmp_path: Path):
    (tmp_path / "x.csv").write_text("prompt,completion,,\na,b,,\n")
    assert said(tmp_path / "x.csv") == [["a", "b"]]


def test_files_of_several_types_are_streamed_together_but_not_with_parquet(tmp_path: Path):
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\n")
    lines(tmp_path / "b.jsonl", PAIR)
    assert said(tmp_path / "*", streaming=True) == [["a", "b"]] * 2
    (tmp_path / "c.parquet").write_bytes(b"x")
    with pytest.raises(
        DataError, match=r"of one type of \.jsonl, \.json, \.parquet, \.csv, not \.csv, \.jsonl, \.parq"
    ):
        opened(tmp_path / "*", streaming=True)

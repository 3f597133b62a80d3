"""Prompts from the user's own functions (python://)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forge_core.config.data_sections import DatasetSection
from forge_core.data import DataError, check_dataset, load_prompts

SOURCE = """
from neighbour_of_rows import ANSWER

def sums(count, start=0):
    return [{"prompt": f"{i}+1=", "answer": ANSWER + i} for i in range(start, start + count)]

def nothing(): return []
def number(): return 5
def called(): raise RuntimeError("must not be called by a check")
value = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows_source.py").write_text(SOURCE)
    (tmp_path / "neighbour_of_rows.py").write_text("ANSWER = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # importing a file adds its folder
    return tmp_path


def section(path: str, **fields) -> DatasetSection:
    return DatasetSection(path=f"python://{path}", **fields)


@pytest.mark.parametrize("where", ["rows_source.py", "./rows_source.py", "{folder}/rows_source.py"])
def test_a_function_of_a_file_gives_the_rows(folder: Path, where: str):
    path = where.format(folder=folder)
    prompts = load_prompts(section(f"{path}:sums", options={"count": 3, "start": 10}), seed=0)
    assert [(p.messages[0]["content"], p.target) for p in prompts] == [
        ("10+1=", "11"),
        ("11+1=", "12"),
        ("12+1=", "13"),
    ]
    assert prompts[0].task == "sums"


def test_a_function_of_a_module_gives_the_rows():
    prompts = load_prompts(section("forge_core.data.sort_digits:prompts", size=7), seed=0)
    assert len(prompts) == 7


def test_a_changed_file_is_imported_anew(folder: Path):
    one = section("rows_source.py:sums", options={"count": 1})
    before = load_prompts(one, seed=0)[0].target
    (folder / "rows_source.py").write_text(SOURCE.replace("ANSWER + i", "100"))
    assert (before, load_prompts(one, seed=0)[0].target) == ("1", "100")


def test_a_check_does_not_call_the_function(folder: Path):
    check_dataset(section("rows_source.py:called"))


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("no_such_module_here:f", {}, r"dataset\.path: python://no_such_module_here:f: .*No module named"),
        ("no_such_file.py:f", {}, r"dataset\.path: python://no_such_file\.py:f: no such file"),
        ("rows_source.py:sum", {}, r"rows_source\.py has no 'sum'; it has called, nothing, number, sums"),
        ("rows_source.py:value", {}, r"is a int, not a function"),
        ("rows_source.py", {}, r"write <module>:<name> or <file\.py>:<name>"),
        ("rows_source.py:__import__('os')", {}, r"write <module>:<name>"),
        ("broken_source.py:f", {}, r"importing .*broken_source\.py failed: SyntaxError"),
        ("rows_source.py:sums", {"n": 3}, r"dataset\.options: .* takes \(count, start\), but .*'n'"),
        ("rows_source.py:sums", {}, r"dataset\.options: .*missing a required argument: 'count'"),
    ],
)
def test_a_bad_path_or_option_is_named(folder: Path, path: str, options: dict, message: str):
    (folder / "broken_source.py").write_text("def f(:\n")
    with pytest.raises(DataError, match=message):
        check_dataset(section(path, options=options))


def test_what_the_function_returns_is_checked(folder: Path):
    with pytest.raises(DataError, match="returned a int; it must return a list of dicts"):
        load_prompts(section("rows_source.py:number"), seed=0)
    with pytest.raises(DataError, match="has no rows"):
        load_prompts(section("rows_source.py:nothing"), seed=0)

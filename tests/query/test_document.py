"""docs/queries.md: every recipe has the output that the document shows; its tables have the columns that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flows.cli import main
from forge_core.query import RunTables
from forge_core.query.runs import DERIVED, EXTRA, TABLES
from forge_core.store import open_store
from tests.docs.documents import ROOT, Block, blocks, commands, table_rows
from tests.query.example import RUN, example_run

DOCUMENT = ROOT / "docs" / "queries.md"
BLOCKS = blocks(DOCUMENT)
RECIPES: list[tuple[Block, Block]] = [(b, BLOCKS[i + 1]) for i, b in enumerate(BLOCKS) if b.language == "sql"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("queries")
    example_run(open_store(str(folder / "forge-store")))
    return folder


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FORGE_STORE", raising=False)


@pytest.mark.parametrize(("recipe", "output"), RECIPES, ids=range(len(RECIPES)))
def test_a_recipe_says_what_the_document_shows(recipe: Block, output: Block, capsys: pytest.CaptureFixture[str]):
    assert main(["query", RUN, "--sql", recipe.text]) == 0
    assert capsys.readouterr().out == output.text


def test_the_command_and_the_python_twin_agree(capsys: pytest.CaptureFixture[str]):
    (line,) = [c for block in BLOCKS if block.language == "bash" for c in commands(block)]
    assert main(shlex.split(line)[1:]) == 0
    assert "| 2     | 0.390625 |" in capsys.readouterr().out
    (python,) = [block.text for block in BLOCKS if block.language == "python"]
    found: dict = {}
    exec(compile(python, str(DOCUMENT), "exec"), found)
    assert found["table"].sort_by("batch").column("reward").to_pylist()[2] == 0.390625
    assert set(found["frame"]["reward"]) == {0.625, 1.0}


def test_the_document_names_every_table_and_its_columns(folder: Path):
    rows = {row[0].strip("`"): re.findall(r"`(\w+)`", row[3]) for row in table_rows(DOCUMENT, "table")}
    assert rows.keys() == {*TABLES}
    with RunTables(str(folder / "forge-store"), [RUN]) as tables:
        for name, documented in rows.items():
            columns = tables.arrow(f"SELECT * FROM {name} LIMIT 1").column_names
            added = [*EXTRA[name], *DERIVED.get(name, {})] if name in EXTRA else columns
            assert documented == added, name

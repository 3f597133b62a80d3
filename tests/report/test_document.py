"""The commands of docs/report.md, as written, in a folder with two runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from flows.cli import main
from forge_core.runs import liveness
from forge_core.store import open_store
from tests.docs.documents import ROOT, blocks, commands, table_rows
from tests.query.example import example_run

pytestmark = pytest.mark.server  # many processes


def test_every_command_of_the_document_works_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORGE_STORE", raising=False)
    store = example_run(open_store("forge-store"))
    example_run(store, "second", steps=2)
    typed = [c for block in blocks(ROOT / "docs" / "report.md") for c in commands(block)]
    assert len(typed) == 4
    assert [main(shlex.split(command)[1:]) for command in typed] == [0, 0, 0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"forge-store", "first-report", "both"}
    assert capsys.readouterr().out.count("step 3 of 3, finished") == 2


def test_every_state_of_a_run_is_explained():
    words = {value for name, value in vars(liveness).items() if name.isupper() and isinstance(value, str)}
    assert {row[0].strip("`") for row in table_rows(ROOT / "docs" / "report.md", "state")} == words
    assert f"in the last {liveness.LEAST_S:.0f} seconds" in (ROOT / "docs" / "report.md").read_text()

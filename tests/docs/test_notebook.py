"""The notebooks of the documents run, from the first cell to the last, and show what they are stored with."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest

from tests.docs.notebook import NOTEBOOKS, executed, presentable

MASKED = (  # what is another one in each run, or on each machine
    (r"\x1b\[[0-9;]*m|[\u2500-\u257f]+", ""),  # colours, and lines of tables, which are as wide as their figures
    (r"/\S*/forge-\w{8}(?=/)", "FOLDER"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
    (r"-?\d[\d,.:]*(e[-+]?\d+)?|(?<= )-(?= )|NaN", "0"),  # a figure, or that there is none yet
    (r"\s+", ""),
    (r"0+", "0"),  # cells of a table
)
every_notebook = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)


@every_notebook
def test_a_notebook_is_stored_with_outputs_and_without_errors(file: Path):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert "error" not in kinds
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)


@pytest.mark.engine
@pytest.mark.server
@every_notebook
def test_a_notebook_runs_and_prints_what_it_is_stored_with(file: Path, tmp_path: Path):
    variables = {"FORGE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    made = presentable(executed(file, tmp_path, variables))
    stored = nbformat.read(file, as_version=4)
    for new, old in zip(made.cells, stored.cells, strict=True):
        assert new.source == old.source
        if new.cell_type == "code":
            assert kinds(new) == kinds(old), new.source
            assert words(new) == words(old), new.source
    assert "Completed - 10 training steps committed" in nbformat.writes(made)


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell shows, in kind."""
    return sorted({kind for output in cell.outputs for kind in output.get("data", {output.output_type: ""})})


def words(cell: nbformat.NotebookNode) -> tuple[str, set[str]]:
    """What a cell prints, and what it displays (how often news come depends on time), without figures."""
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return masked(printed), {masked(output.data["text/plain"]) for output in cell.outputs if "data" in output}


def masked(text: str) -> str:
    text = text.replace("\n", "")  # a console breaks long lines
    for pattern, instead in MASKED:
        text = re.sub(pattern, instead, text)
    return text


@every_notebook
def test_outputs_are_compared_without_figures_and_with_every_word(file: Path):
    seen = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code" and cell.outputs]
    for cell in seen:
        for figures, same in ((r"\d", True), (r"[A-Za-z]{3}\b", False)):
            other = deepcopy(cell)
            for output in other.outputs:
                shown, key = (output, "text") if output.output_type == "stream" else (output.data, "text/plain")
                shown[key] = re.sub(figures, "7" if same else "another", shown[key])
            if str(other) != str(cell):
                assert (words(other) == words(cell)) is same, cell.source

"""The notebooks of the documents run, from the first cell to the last, and show what they are stored with."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.docs.notebook import NOTEBOOKS, executed, presentable

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
        if new.cell_type == "code":  # the figures of tables are those of the machine; how they look is not
            assert kinds(new) == kinds(old), new.source
    assert "Completed - 10 training steps committed" in nbformat.writes(made)


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell shows, in kind."""
    return sorted({kind for output in cell.outputs for kind in output.get("data", {output.output_type: ""})})

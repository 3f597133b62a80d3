"""Runs a notebook of the documents as a reader would. ``python -m tests.docs.notebook`` stores what it shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.docs.documents import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LIMIT_S = 240  # of a cell


def executed(file: Path, folder: Path, variables: Mapping[str, str]) -> NotebookNode:
    """The notebook with its outputs, run in ``folder``. Raises CellExecutionError with what the cell said."""
    notebook = nbformat.read(file, as_version=4)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with mock.patch.dict(os.environ, {"PATH": path, "PYTHONPATH": str(ROOT), **variables}):
        resources = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=resources).execute()
    return notebook


def presentable(notebook: NotebookNode) -> NotebookNode:
    """Without times, and without what goes to standard error: warnings and bars of the machine that it ran on."""
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    for file in NOTEBOOKS:
        nbformat.write(presentable(executed(file, file.parent, {})), file)

"""docs/services.md: its program runs as a reader would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, blocks

pytestmark = pytest.mark.server  # many processes


def test_its_program_runs(tmp_path: Path) -> None:
    module, program = [block.text for block in blocks(ROOT / "docs/services.md") if block.language == "python"]
    (tmp_path / "counters.py").write_text(module)
    (tmp_path / "main.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "return self.value / other" in done.stdout

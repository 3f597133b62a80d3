"""A reader who types every command of the documents, in an empty folder, in order, gets what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, blocks
from tests.docs.journey import Step, journey

pytestmark = [pytest.mark.engine, pytest.mark.server]


def do(step: Step, folder: Path, home: Path) -> str:
    """Run one step in ``folder``; its output. Fails the test when it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-c", step.text] if step.language == "bash" else [sys.executable, "-c", step.text]
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path, "FORGE_HOME": str(home)}, capture_output=True, text=True
    )
    print(f"{time.monotonic() - started:6.1f} s  {step.document}: {step.text.splitlines()[0]}")
    assert done.returncode == 0, f"{step.document}: {step.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_every_command_of_the_documents_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FORGE_STORE", raising=False)
    folder, said = tmp_path, {}
    for step in journey():
        if step.text.startswith("cd "):
            folder = folder / step.text.removeprefix("cd ")
        else:
            said[step.text] = do(step, folder, tmp_path / "home")
    assert "20 of 20" in said["forge runs"]
    assert "step 20/20  reward" in said["forge train config.yaml run.id=first"]
    assert "nothing to stop" in said["forge stop first"]
    assert "step 30/30" in said["forge resume first steps=30 --allow-config-change steps"]
    assert re.search(r"^s:47120= ?\d{5}$", said[next(t for t in said if "model.generate" in t)], flags=re.M)
    assert_the_layout_is_as_documented(folder / "forge-store")


def assert_the_layout_is_as_documented(store: Path) -> None:
    """Every key of the run stands in the layout of docs/store.md, and everything in the layout is there."""
    (layout,) = [b.text for b in blocks(ROOT / "docs" / "store.md") if b.text.startswith("runs/")]
    patterns = [re.escape(line.split()[0]) for line in layout.splitlines()]
    patterns = [re.sub(r"<(batch|round|shard|version|n)>", r"\\d{8}", p).replace("<run_id>", "first") for p in patterns]
    patterns = [p.replace("<digest>", "[0-9a-f]{12}").replace("<name>", r"\w+") for p in patterns]
    patterns = [p.replace("<attempt>", "[0-9a-f]{8}") + ("[^/]+" if p.endswith("/") else "") for p in patterns]
    keys = [
        str(f.relative_to(store))
        for f in store.rglob("*")
        if f.is_file() and not f.relative_to(store).parts[0].startswith(".")
    ]
    assert [k for k in keys if not any(re.fullmatch(p, k) for p in patterns)] == []
    absent = [p for p in patterns if not any(re.fullmatch(p, k) for k in keys)]
    assert [p for p in absent if not re.search("reference|workers|control/(stop|failure)", p)] == [], (
        "beta is 0; forge gc takes the signs of life of a finished run; nothing was stopped or failed"
    )

"""Every command of docs/retraining.md, in its order, as a reader types it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from flows.cli import main
from tests.docs.documents import ROOT, blocks, commands
from tests.retraining.tiny import new_data

DOCUMENT = ROOT / "docs" / "retraining.md"


@pytest.mark.engine
@pytest.mark.server
@pytest.mark.usefixtures("prefect_server")
def test_every_command_does_what_the_document_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORGE_STORE", raising=False)
    (settings,) = [b.text for b in blocks(DOCUMENT) if b.text.startswith("name: digits")]
    said: dict[str, str] = {}
    for line in [c for block in blocks(DOCUMENT) if block.language == "bash" for c in commands(block)]:
        if line.startswith("cd "):
            monkeypatch.chdir(tmp_path / line.removeprefix("cd "))
            (Path.cwd() / "incoming").mkdir()
            new_data(Path.cwd(), "monday", rows=2000)
            Path("retrain.yaml").write_text(settings)
            Path("config.yaml").write_text(Path("config.yaml").read_text().replace("steps: 150", "steps: 40"))  # sooner
            continue
        runs = sorted(Path("forge-store/runs").glob("*")) if Path("forge-store").exists() else []
        typed = line.replace("RUN_ID", runs[0].name) if "RUN_ID" in line else line
        assert main(shlex.split(typed)[1:]) == 0, f"{typed}\n{capsys.readouterr()}"
        said[line] = capsys.readouterr().out
    assert "promoted version 10 of digits-" in said["forge retrain retrain.yaml"]
    assert "| digits | version 10 of digits-" in said["forge models"]
    assert "promote" in said["forge models digits --history"]
    assert "version 0 of digits-" in said["forge promote digits RUN_ID --version 0"]
    assert "is the production model again" in said["forge rollback digits"]
    assert "is the production model already" in said["forge promote digits RUN_ID --best"]
    assert "better on" in said["forge eval model://digits eval.samples=4 --against run://RUN_ID/0"]


def test_the_keys_of_the_gate_are_those_of_the_document():
    from forge_core.config.retrain_config import GateSection

    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    documented = [key.strip("` ") for row in rows for key in row.split("|")[1].split(",")]
    assert documented == list(GateSection.model_fields)

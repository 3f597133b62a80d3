"""docs/sft.md: every command, in its order, as a reader types it; and the page of keys."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from flows.cli import main
from forge_core.config import fields_reference
from forge_core.config.keys import keys_of
from forge_core.config.sft_config import SftConfig
from tests.docs.documents import ROOT, blocks, commands

DOCUMENT = ROOT / "docs" / "sft.md"
COMMANDS = [c for block in blocks(DOCUMENT) if block.language == "bash" for c in commands(block)]
SOONER = ["training.sync_interval=2", "training.batch_size=8", "validation.rows=8"]


@pytest.mark.engine
@pytest.mark.server
@pytest.mark.usefixtures("prefect_server")
def test_every_command_does_what_the_document_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORGE_STORE", raising=False)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    said: dict[str, str] = {}
    for line in COMMANDS:
        words = shlex.split(line)[1:]
        if words[0] == "sft":
            words += SOONER
        if words[0] == "train":
            words += ["training.batch_size=64", "training.warmup_steps=0", "eval.prompts=16"]
        assert main(words) == 0, f"{line}\n{capsys.readouterr()}"
        captured = capsys.readouterr()
        said[line] = captured.out + captured.err
    assert "taken all of its 3 training steps" in said["forge resume tuned"]
    assert "step 4/4  loss" in said["forge resume tuned steps=4 --allow-config-change steps"]
    assert (tmp_path / "tuned-model" / "model.safetensors").exists()
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    assert "step 1/1  reward" in said[COMMANDS[-1]]


def test_the_page_of_keys_is_in_step_with_the_models():
    with keys_of(SftConfig):
        reference = fields_reference()
    page = (ROOT / "docs" / "sft-configuration.md").read_text()
    assert page.endswith(reference.rstrip() + "\n"), "write fields_reference() to the page again"

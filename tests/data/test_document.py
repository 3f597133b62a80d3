"""The command of docs/data.md, and the figures that it quotes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from flows.cli import main
from forge_core.data.conversations import FORMATS
from forge_core.data.sft_settings import SftDataConfig
from tests.docs.documents import ROOT, blocks, commands, table_rows

DOCUMENT = ROOT / "docs" / "data.md"


def test_the_command_prints_what_the_document_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = blocks(DOCUMENT)
    rows, shown = (next(b.text for b in found if b.text.startswith(start)) for start in ('{"question"', "+---"))
    (command,) = [line for block in found if block.language == "bash" for line in commands(block)]
    (tmp_path / "prompts.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command.replace("configs/", f"{ROOT}/configs/"))[1:]) == 0
    printed = capsys.readouterr()
    assert printed.out + printed.err == shown


def test_the_own_data_set_of_the_document_is_read_with_its_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = blocks(DOCUMENT)
    (source,) = [b.text for b in found if b.language == "python"]
    (section,) = [b.text for b in found if b.language == "yaml" and "my_data.py" in b.text]
    (tmp_path / "my_data.py").write_text(source)
    recipe = (ROOT / "configs" / "quickstart.yaml").read_text()
    (tmp_path / "config.yaml").write_text(re.sub(r"^dataset:.*\n(  .*\n)*", section, recipe, flags=re.M))
    monkeypatch.chdir(tmp_path)
    assert main(["data", "config.yaml", "eval.holdout=0", "model.vocabulary='0123456789+=,:darst'"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"trained on +\| 500 ", printed)
    assert len(re.findall(r"^\| [012] +\| 16[67] ", printed, flags=re.M)) == 3


def test_the_mixture_of_the_document_is_a_section_and_its_formats_are_all_there():
    import yaml

    (mixture,) = [b.text for b in blocks(DOCUMENT) if b.text.startswith("dataset:\n  mixture")]
    section = SftDataConfig.model_validate(yaml.safe_load(mixture)["dataset"])
    assert [source.called for source in section.tree()][1:] == [
        "org_chats_train",
        "maths",
        "solutions_train",
        "org_proofs_train",
    ]
    assert [row[0].strip("`") for row in table_rows(DOCUMENT, "`format`")] == list(FORMATS)


def test_the_shares_of_real_tokens_are_those_that_were_measured():
    result = json.loads((ROOT / "benchmarks" / "results" / "packing_efficiency.json").read_text())
    share = {(r["lengths"], r["seq_len"]): r["real_share"] for r in result["lengths"] if r["window"] == 128}
    text = DOCUMENT.read_text()
    for key in (("mixed", 8192), ("mixed", 16384), ("reasoning", 2048)):
        assert f"{100 * share[key]:.1f} %" in text
    assert all(row["real_share"] >= result["goal"]["real_share_at_least"] for row in result["rows"])
    assert share["mixed", 8192] >= result["goal"]["real_share_at_least"]

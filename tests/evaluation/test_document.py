"""Every command of docs/evaluation.md, in its order, as a reader types it; then the flow that a worker runs."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.cli import main
from forge_core.store import Ledger, open_store
from tests.docs.documents import ROOT, blocks, commands, table_rows

DOCUMENT = ROOT / "docs" / "evaluation.md"
COMMANDS = [c for block in blocks(DOCUMENT) if block.language == "bash" for c in commands(block)]
SOONER = ["steps=5", "eval.prompts=24", "warm_start.steps=60", "training.batch_size=64", "training.warmup_steps=0"]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, prefect_server: Any) -> dict[str, str]:
    """What each command printed, in a folder of its own."""
    folder, found = tmp_path_factory.mktemp("reader"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("FORGE_STORE", raising=False)
        (folder / "configs").symlink_to(ROOT / "configs")
        for line in COMMANDS:
            found[line] = _typed(shlex.split(line)[1:], folder)
    return {"folder": str(folder), **found}


def _typed(words: list[str], folder: Path) -> str:
    """Run one command; what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(words + (SOONER if words[0] == "train" else []))
    assert status == 0, f"{words}\n{out.getvalue()}"
    return out.getvalue()


@pytest.mark.engine
@pytest.mark.server
class TestReader:
    def test_every_command_does_what_the_document_says(self, said: dict[str, str]) -> None:
        folder = Path(said["folder"])
        train, newest, greedy, many, against, _, exported = COMMANDS
        assert "step 5/5" in said[train]
        assert "run://sorter/5: evaluated by its run" in said[newest]
        assert "run://sorter/4: evaluating 48 responses to 24 prompts" in said[greedy]
        assert "8: " in said[many], "pass@8"
        assert "paired permutation test" in said[against]
        assert "evaluating" in said[exported], "the quickstart evaluates more prompts"
        assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in ("sorter.png", "both.png"))

    def test_the_ledger_has_the_metrics_of_the_document(self, said: dict[str, str]) -> None:
        entries = Ledger(open_store(said["folder"] + "/forge-store"), "sorter").entries()
        found = {e["batch"]: {m for m in e["metrics"] if m.startswith("eval/")} for e in entries}
        assert [batch for batch, metrics in found.items() if metrics] == [1, 4]
        versions = [entries[1]["metrics"]["eval/version"], entries[4]["metrics"]["eval/version"]]
        assert [*versions, entries[4]["metrics"]["eval/before/version"]] == [0, 5, 4]
        documented = {name.strip("` ") for row in table_rows(DOCUMENT, "metric") for name in row[0].split(",")}
        documented = {name.removesuffix("` ...") for name in documented} - {"eval/task/<task>/reward/mean"}
        assert {m for m in found[4] if not m.startswith("eval/before/")} == documented
        assert {m.replace("eval/before/", "eval/") for m in found[4] if m.startswith("eval/before/")} == documented
        assert all(entries[batch]["metrics"]["time/eval"] >= 0 for batch in (1, 4))

    def test_the_flow_of_a_worker_leaves_a_table_a_picture_and_a_report(
        self, said: dict[str, str], prefect_server: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from flows.evaluate import evaluate

        monkeypatch.chdir(said["folder"])
        state = evaluate("run://sorter", store="forge-store", against="run://sorter/0", return_state=True)
        assert state.is_completed(), state
        assert "against run://sorter/0" in state.message
        wanted = {"flow_runs": {"id": {"any_": [str(state.state_details.flow_run_id)]}}}
        found = httpx.post(f"{prefect_server.url}/artifacts/filter", json=wanted, timeout=30).json()
        artifacts = {artifact["type"]: artifact for artifact in found}
        assert artifacts.keys() == {"table", "image", "markdown"}
        assert [row["policy"] for row in json.loads(artifacts["table"]["data"])] == ["run://sorter/5", "run://sorter/0"]
        assert artifacts["image"]["data"].startswith("data:image/png;base64,")
        assert "paired permutation test" in artifacts["markdown"]["data"]


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for file in ("plot.jpg", str(tmp_path / "nowhere" / "plot.png")):
        assert main(["eval", "run://sorter", "--plot", file]) == 2
        assert f"--plot {file}: write a file that ends with .png, in a folder that is there" in capsys.readouterr().err

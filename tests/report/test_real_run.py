"""Reports of runs that engines made: every figure there is something for, and nothing to complain of."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import watching
from forge_core.report import write_report
from forge_core.report.facts import collect
from forge_core.report.spans import spans
from forge_core.report.watching import Watched
from forge_core.store import Store, open_store
from tests.sft import harness as sft

pytestmark = pytest.mark.engine
FIGURES = ("reward", "lengths", "stability", "staleness", "stages", "throughput", "gantt")


def test_the_report_of_a_real_run_has_all_figures(real_run: Store, tmp_path: Path):
    made = write_report(real_run, ["tiny"], tmp_path)
    assert made.problems == {"tiny": []}
    assert {file.stem for file in made.pictures} >= {*FIGURES} - {"throughput"}
    page = made.page.read_text()
    assert page.count("<article>") == 9
    assert "held-out reward" in page


def test_the_timeline_of_a_real_run_is_in_order(real_run: Store):
    found = spans(collect(real_run, "tiny"))
    for batch in "0123":
        ends = {role: max(s.end for s in found if s.role == role and s.label == batch and s.kind == "work")
                for role in ("generator", "scorer", "trainer")}  # fmt: skip
        assert ends["generator"] <= ends["scorer"] + 0.01
        assert ends["scorer"] <= ends["trainer"]
    assert {s.label for s in found if s.role == "evaluation"} == {"v0", "v2", "v4"}


def test_a_real_run_is_watched(real_run: Store, capsys: pytest.CaptureFixture[str]):
    watching.show_once(Watched(real_run, "tiny"))
    text = capsys.readouterr().out
    assert "step 4 of 4, finished" in text
    assert "held-out reward" in text


def test_a_supervised_run_has_its_own_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ctx = sft.advance(sft.new_run(open_store(sft.memory()), sft.write_data(tmp_path / "data.jsonl")), 2)
    made = write_report(ctx.store, ["tiny-sft"], tmp_path / "out")
    watching.show_once(Watched(ctx.store, "tiny-sft"))
    ctx.close()
    assert made.problems == {"tiny-sft": []}
    assert {"loss", "stages", "gantt"} <= {file.stem for file in made.pictures}
    text = capsys.readouterr().out
    assert "loss" in text
    assert "generator" not in text

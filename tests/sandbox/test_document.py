"""docs/sandbox.md: its program runs, and its figures and limits are those of the code."""

from __future__ import annotations

import json
from dataclasses import fields

from forge_core.sandbox import Limits
from tests.docs.documents import ROOT, blocks, table_rows

DOCUMENT = ROOT / "docs/sandbox.md"


def test_its_program_runs() -> None:
    (program,) = [block.text for block in blocks(DOCUMENT) if block.language == "python"]
    exec(compile(program, str(DOCUMENT), "exec"), {})


def test_its_limits_are_the_defaults() -> None:
    rows = table_rows(DOCUMENT, "limit | default | kept by")
    named = {
        name.strip("` "): int(value)
        for names, values, _ in rows[1:]
        for name, value in zip(names.split(","), values.split(","), strict=True)
    }
    assert named == {field.name: field.default for field in fields(Limits)}


def test_its_figures_are_those_of_the_benchmark() -> None:
    measured = json.loads((ROOT / "benchmarks/results/sandbox.json").read_text())
    text = DOCUMENT.read_text()
    for name in ("sandbox_per_s_2_threads", "function_tests_per_s_2_threads", "assert_tests_per_s_2_threads"):
        assert f"{measured[name]:.0f} a second" in text

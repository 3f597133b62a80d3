"""Tables of figures in the documents are those of the committed results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.docs.documents import ROOT


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["faults", "worker_kills"])
def test_kills(name: str) -> None:
    lines = (ROOT / "docs" / "operating.md").read_text().splitlines()
    for kind, figures in result(name)["by_kind"].items():
        seconds = [f"{figures[key]['median']} s ({figures[key]['max']} s)" for key in ("lost_s", "recovery_s")]
        assert f"| {kind} | {figures['kills']} | {seconds[0]} | {seconds[1]} |" in lines

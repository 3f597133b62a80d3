"""The benchmark of supervised steps runs where there is no GPU, and finds the numbers right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.mark.engine
def test_it_measures_packed_rows_after_it_has_checked_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from benchmarks.sft_gpu import main

    monkeypatch.setenv("OUT", str(tmp_path))
    words = "--device cpu --shape tiny --seq-len 64 128 --steps 1 --documents 100"
    monkeypatch.setattr(sys, "argv", ["sft_gpu", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    result = json.loads((tmp_path / "sft_gpu.json").read_text())
    assert (ended.value.code, result["problems"]) == (0, [])
    assert [row["seq_len"] for row in result["rows"]] == [64, 128]
    assert all(row["tokens_per_second"] > 0 for row in result["rows"])


def test_the_documents_have_the_measured_figures() -> None:
    root = Path(__file__).parents[2]
    measured = json.loads((root / "benchmarks" / "results" / "sft_gpu.json").read_text())
    assert measured["problems"] == []
    text = (root / "docs" / "sft.md").read_text()
    for length in (8192, 16384):
        speeds = {row["setting"]: row for row in measured["rows"] if row["seq_len"] == length}
        rates, memory = [], []
        for setting in ("eager", "compile"):
            rates.append(f"{round(speeds[setting]['tokens_per_second'], -2):,.0f}")
            memory.append(f"{speeds[setting]['peak_memory_gib']:.0f}")
        assert f"| {length:,} | {rates[0]} | {rates[1]} | {' and '.join(memory)} GiB |" in text

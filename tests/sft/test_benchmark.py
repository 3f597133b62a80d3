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

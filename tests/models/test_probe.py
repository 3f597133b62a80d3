"""Comparing what an engine computes with what the trainer published."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from forge_core.models import probe

IDS = probe.sequences(1000, 5)
LOGPROBS = [[-1.0, -2.0, -3.0, -4.0] for _ in IDS]


def published(folder: Path, dtype: str = "float32") -> dict:
    probe.write(folder, IDS, LOGPROBS, dtype)
    found = probe.read(folder)
    assert found is not None
    return found


def off_by(distance: float) -> list[list[float]]:
    return [[x + distance for x in row] for row in LOGPROBS]


def test_sequences_fit_the_model_and_differ() -> None:
    rows = probe.sequences(53, 2048)
    assert {len(row) for row in rows} == {probe.TOKENS}
    assert all(0 <= token < 53 for row in rows for token in row)
    assert len({tuple(row) for row in rows}) == probe.SEQUENCES
    assert [len(row) for row in probe.sequences(53, 7)] == [7] * probe.SEQUENCES


def test_equal_numbers_pass_and_others_do_not(tmp_path: Path) -> None:
    expected = published(tmp_path)
    probe.check(expected, off_by(5e-5), "float32", 3)
    with pytest.raises(probe.ProbeFailed, match=r"probe of version 3 differ from the trainer's by 0.001"):
        probe.check(expected, off_by(1e-3), "float32", 3)


def test_the_coarsest_type_decides_how_close_is_close(tmp_path: Path) -> None:
    probe.check(published(tmp_path), off_by(0.1), "bfloat16", 1)
    probe.check(published(tmp_path, "bfloat16"), off_by(0.1), "float32", 1)
    with pytest.raises(probe.ProbeFailed):
        probe.check(published(tmp_path, "bfloat16"), off_by(0.3), "float32", 1)


def test_what_is_no_number_fails(tmp_path: Path) -> None:
    for wrong in (math.nan, -math.inf):
        with pytest.raises(probe.ProbeFailed):
            probe.check(published(tmp_path), [[wrong] * 4] * len(IDS), "bfloat16", 1)


def test_an_engine_with_less_room_compares_the_beginnings(tmp_path: Path) -> None:
    expected = published(tmp_path)
    probe.check(expected, [row[:2] for row in LOGPROBS], "float32", 1)
    with pytest.raises(probe.ProbeFailed):
        probe.check(expected, [row[:2] for row in off_by(1.0)], "float32", 1)


def test_a_folder_without_a_probe_has_none(tmp_path: Path) -> None:
    assert probe.read(tmp_path) is None

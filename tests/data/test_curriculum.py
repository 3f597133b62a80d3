"""Prompts from easy to hard, wherever a run is interrupted."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.config.data_sections import CurriculumSection, DatasetSection
from forge_core.data import Cursor, DataError, PromptSet, check_dataset, load_prompts, next_rows
from forge_core.data.curriculum import Curriculum, curriculum_of, difficulty_of
from forge_core.runs.planning import Planner
from tests.runs.harness import tiny


def stored(folder: Path, difficulties: list[Any], name: str = "level", **curriculum: Any) -> PromptSet:
    rows = [{"prompt": f"p{i}", "answer": "a", name: value} for i, value in enumerate(difficulties)]
    (folder / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DatasetSection(path=str(folder / "set.jsonl"), curriculum={"column": name, **curriculum})
    return load_prompts(section, seed=0)


def made(prompts: PromptSet, **fields: Any) -> Curriculum:
    found = curriculum_of(prompts, range(len(prompts)), CurriculumSection(**{"column": "level", **fields}))
    assert found is not None
    return found


DIFFICULTIES = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@settings(deadline=None)
@given(DIFFICULTIES, st.integers(1, 8), st.integers(0, 99), st.booleans())
def test_an_epoch_visits_each_row_once_and_never_an_easier_one_after_a_harder(
    difficulties: list[int], levels: int, seed: int, shuffle: bool
):
    curriculum = by_level(difficulties, levels)
    visited = [row for row, _ in islice(visits(curriculum, difficulties, seed, shuffle), len(difficulties))]
    assert sorted(visited) == list(range(len(difficulties)))
    level_of = {row: i for i, rows in enumerate(curriculum.levels) for row in rows}
    assert [level_of[row] for row in visited] == sorted(level_of.values())
    hardest = [max(difficulties[row] for row in rows) for rows in curriculum.levels]
    easiest = [min(difficulties[row] for row in rows) for rows in curriculum.levels]
    assert all(a <= b for a, b in zip(hardest, easiest[1:], strict=False))


@settings(deadline=None)
@given(DIFFICULTIES, st.integers(0, 120), st.integers(0, 99))
def test_a_stored_cursor_goes_on_exactly_within_the_levels_and_after_them(
    difficulties: list[int], stop: int, seed: int
):
    curriculum = by_level(difficulties, 3)
    whole = list(islice(visits(curriculum, difficulties, seed), stop + 20))
    cursor = whole[stop - 1][1] if stop else Cursor()
    again = Cursor(**json.loads(json.dumps(asdict(cursor))))
    resumed = next_rows(again, range(len(difficulties)), seed, True, curriculum)
    assert list(islice(resumed, 20)) == whole[stop:]


def by_level(difficulties: list[int], levels: int) -> Curriculum:
    from forge_core.data.curriculum import _levels

    return Curriculum(_levels({i: float(d) for i, d in enumerate(difficulties)}, levels), epochs=1)


def visits(curriculum: Curriculum, difficulties: list[int], seed: int, shuffle: bool = True):
    return next_rows(Cursor(), range(len(difficulties)), seed, shuffle, curriculum)


def test_after_the_ordered_epochs_prompts_come_in_any_order(tmp_path: Path):
    prompts = stored(tmp_path, [i % 4 for i in range(80)])
    curriculum = made(prompts, epochs=2)
    order = [row % 4 for row, _ in islice(next_rows(Cursor(), range(80), 0, True, curriculum), 240)]
    assert order[:80] == order[80:160] == sorted(order[:80])
    assert order[160:] != sorted(order[160:])
    plain = [row for row, _ in islice(next_rows(Cursor(2, 0), range(80), 0, True), 80)]
    assert [row for row, _ in islice(next_rows(Cursor(2, 0), range(80), 0, True, curriculum), 80)] == plain


def test_few_difficulties_are_a_level_each_and_many_are_cut_evenly(tmp_path: Path):
    assert [len(level) for level in made(stored(tmp_path, [3, 1, 1, 2])).levels] == [2, 1, 1]
    many = made(stored(tmp_path, list(range(50))), levels=4)
    assert [len(level) for level in many.levels] == [12, 13, 12, 13]
    assert many.levels[0] == tuple(range(12))


def test_a_pass_rate_goes_down_and_rows_without_one_are_the_hardest(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        curriculum = made(stored(tmp_path, [0.1, None, 0.9, 0.5]), descending=True)
    assert curriculum.levels == ((2,), (3,), (0,), (1,))
    assert "1 rows state no difficulty: they are the hardest" in caplog.text
    assert made(stored(tmp_path, [0.1, None, 0.9, 0.5])).levels == ((0,), (3,), (2,), (1,))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        ("Level 3", 3.0),
        ("1e-2", 0.01),
        ("-4.5 points", -4.5),
        ("\u22124.5e\u22121", -0.45),
        ("Level ?", None),
        (None, None),
        (True, None),
        ("level-3", 3.0),
        ("level -3", -3.0),
        ("(AMC)-10", 10.0),
        ("1,000", 1000.0),
        ("1,000,000.5 steps", 1000000.5),
        ("1,2", 1.0),
        (".5", 0.5),
        ("-.5", -0.5),
        ("No.5", 5.0),
        ("...5", 5.0),
        (Decimal("0.5"), 0.5),
        (Decimal("NaN"), None),
        (Fraction(1, 2), 0.5),
        (float("inf"), None),
    ],
)
def test_difficulty_is_a_number_or_text_with_one(value: Any, number: float | None):
    assert difficulty_of(value) == number


def test_decimals_of_parquet_are_numbers(tmp_path: Path):
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "level": [Decimal("0.5"), Decimal("0.2")]})
    pq.write_table(table, tmp_path / "set.parquet")
    prompts = load_prompts(DatasetSection(path=str(tmp_path / "set.parquet")), seed=0)
    assert made(prompts).levels == ((1,), (0,))


def test_a_column_that_is_missing_or_holds_no_number_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"dataset: there is no column 'hard'; the columns are prompt, answer, level"):
        made(stored(tmp_path, [1]), column="hard")
    with pytest.raises(DataError, match=r"curriculum\.column: no row has a number in 'level' \(the first has 'x'\)"):
        made(stored(tmp_path, ["x", "y"]))
    section = DatasetSection(path=str(tmp_path / "set.jsonl"), curriculum={"column": "hard"})
    with pytest.raises(DataError, match="there is no column 'hard'"):
        check_dataset(section)


def test_generated_prompts_have_levels_by_what_their_task_states():
    section = DatasetSection(path="reasoning_gym://chain_sum", options={"size": 60})
    prompts = load_prompts(section, seed=0)
    curriculum = made(prompts, column="reasoning_gym.entry.metadata.num_terms")
    terms = [row for row, _ in islice(next_rows(Cursor(), range(60), 0, True, curriculum), 60)]
    counts = [prompts[row].metadata["reasoning_gym"]["entry"]["metadata"]["num_terms"] for row in terms]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2


def test_plans_follow_the_levels_and_a_refill_is_no_harder_than_its_batch(tmp_path: Path):
    prompts = stored(tmp_path, [i // 20 for i in range(60)])
    planner = Planner(tiny(), prompts, list(range(60)), lambda row: [1] * 4, made(prompts))
    cursor, levels = Cursor(), []
    for batch in range(6):
        plan = planner.plan(batch, cursor)
        assert plan == planner.plan(batch, Cursor(**json.loads(json.dumps(plan["cursor"]["before"]))))
        levels += [group["row"] // 20 for group in plan["groups"]]
        refill = planner.refill(batch, 1, 100, 6, cursor)
        reached = cursor.index // 20
        assert max(group["row"] // 20 for group in refill["groups"]) <= reached
        cursor = Cursor(**plan["cursor"]["after"])
    assert levels == sorted(levels)
    assert levels[0] == 0
    assert levels[-1] == 2


def test_cursors_and_orders_of_runs_without_a_curriculum_are_what_they_were():
    assert asdict(Cursor(3, 5)) == {"epoch": 3, "index": 5}
    rows = [row for row, _ in islice(next_rows(Cursor(), range(8), 7, True), 12)]
    assert rows == [5, 6, 2, 4, 3, 1, 0, 7, 7, 2, 4, 1]  # as before there were curricula

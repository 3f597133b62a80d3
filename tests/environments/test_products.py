"""The task of the calculator recipe: its prompts and its demonstrations."""

from __future__ import annotations

import pytest

from forge_core.data.products import PAIRS, demonstrations, prompts
from forge_core.data.prompts import held_out, prompt_id
from forge_core.environments.calculator import calculate


def test_prompts_are_distinct_pairs_whose_products_have_four_digits():
    rows = prompts(seed=1)
    assert rows == prompts(seed=1) != prompts(seed=2)
    assert len({row["prompt"] for row in rows}) == len(rows) == len(PAIRS)
    assert {len(row["answer"]) for row in rows} == {4}
    assert all(calculate(row["prompt"].rstrip("=")) == row["answer"] for row in rows[:50])


def test_demonstrations_show_each_turn_right_as_often_as_they_say():
    rows = demonstrations(4000, calls=0.25, reads=0.5)
    first = [row for row in rows if "[" not in row["prompt"]]
    second = [row for row in rows if "[" in row["prompt"]]
    assert len(first) == len(second) == 2000
    calls = [row for row in first if row["answer"].startswith("[")]
    assert len(calls) / len(first) == pytest.approx(0.25, abs=0.03)
    assert all(row["answer"] == f"[{row['prompt'].rstrip('=')}]" for row in calls)
    reads = [row for row in second if row["prompt"].endswith(row["answer"])]
    assert len(reads) / len(second) == pytest.approx(0.5, abs=0.04)


def test_no_demonstration_is_about_a_pair_that_is_held_out():
    asked = {row["prompt"].partition("=")[0] + "=" for row in demonstrations(2000)}
    assert not any(held_out(prompt_id([{"role": "user", "content": question}]), 0.1) for question in asked)

"""The order of prompts: every epoch visits each row once, and a stored cursor goes on exactly."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.data import Cursor, DataError, next_rows

ROWS = st.lists(st.integers(0, 10_000), min_size=1, max_size=40, unique=True)
SEEDS = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(rows=ROWS, seed=SEEDS, shuffle=st.booleans(), epochs=st.integers(1, 4))
def test_every_epoch_visits_each_row_once(rows, seed, shuffle, epochs):
    visited = [row for row, _ in islice(next_rows(Cursor(), rows, seed, shuffle), epochs * len(rows))]
    for epoch in range(epochs):
        part = visited[epoch * len(rows) : (epoch + 1) * len(rows)]
        assert sorted(part) == sorted(rows)
        assert shuffle or part == rows


@settings(deadline=None)
@given(rows=ROWS, seed=SEEDS, shuffle=st.booleans(), data=st.data())
def test_resuming_at_any_point_gives_the_same_following_rows(rows, seed, shuffle, data):
    total = 3 * len(rows)
    whole = list(islice(next_rows(Cursor(), rows, seed, shuffle), total))
    point = data.draw(st.integers(1, total - 1))
    stored = json.loads(json.dumps(asdict(whole[point - 1][1])))
    assert list(islice(next_rows(Cursor(**stored), rows, seed, shuffle), total - point)) == whole[point:]


@settings(deadline=None)
@given(rows=ROWS, seed=SEEDS)
def test_the_cursor_after_an_epoch_is_the_start_of_the_next(rows, seed):
    last = list(islice(next_rows(Cursor(), rows, seed, True), len(rows)))[-1][1]
    assert last == Cursor(epoch=1, index=0)


def test_epochs_and_seeds_have_different_orders():
    rows = list(range(100))
    orders = [[r for r, _ in islice(next_rows(Cursor(e), rows, s, True), 100)] for e in (0, 1) for s in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_never_changes_between_releases():
    assert [row for row, _ in islice(next_rows(Cursor(), range(8), 7, True), 8)] == [5, 6, 2, 4, 3, 1, 0, 7]


def test_no_rows_and_a_cursor_past_the_rows_are_errors():
    with pytest.raises(DataError, match=r"no prompt is left to train on.*eval\.holdout"):
        next_rows(Cursor(), [], 0, True)
    with pytest.raises(DataError, match="the data set changed since the run began"):
        next_rows(Cursor(0, 5), [1, 2, 3], 0, True)

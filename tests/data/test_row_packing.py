"""Documents in rows: all of them, whole, apart, and with little waste."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.data.encoding import Document
from forge_core.data.row_packing import arrange, build_row

SEQ_LEN = 16
LENGTHS = st.lists(st.integers(1, SEQ_LEN), max_size=60)


def document(length: int, first: int) -> Document:
    tokens = np.arange(first, first + length + 1, dtype=np.int32)
    return Document(tokens, np.arange(length + 1) % 3 > 0, "whole")


@given(LENGTHS, st.integers(0, 3))
def test_every_document_is_in_one_row_and_no_row_overflows(lengths: list[int], window: int):
    rows = arrange(lengths, SEQ_LEN, 0, window)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= SEQ_LEN for row in rows)
    assert rows == arrange(lengths, SEQ_LEN, 0, window)


@given(LENGTHS)
def test_no_two_rows_could_be_one(lengths: list[int]):
    filled = [sum(lengths[i] for i in row) for row in arrange(lengths, SEQ_LEN, 0, 0)]
    smallest = sorted(filled)[:2]
    assert len(smallest) < 2 or sum(smallest) > SEQ_LEN


def test_the_order_of_rows_changes_with_seed_and_window_and_their_content_does_not():
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, SEQ_LEN, 200)]
    orders = [arrange(lengths, SEQ_LEN, seed, window) for seed, window in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert {frozenset(map(tuple, rows)) for rows in orders}.__len__() == 1
    heads = [max(lengths[i] for i in row) for row in orders[0]]
    assert heads != sorted(heads, reverse=True)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_a_row_keeps_documents_apart(lengths: list[int]):
    documents = [document(length, 100 * (i + 1)) for i, length in enumerate(lengths)]
    row = build_row(documents, 24)
    for i, one in enumerate(documents):
        own = row.document_ids == i
        assert row.input_ids[own].tolist() == one.tokens[:-1].tolist()
        assert row.target_ids[own].tolist() == one.tokens[1:].tolist()
        assert row.target_mask[own].tolist() == one.mask[1:].tolist()
        assert row.positions[own].tolist() == list(range(lengths[i]))
    padding = row.document_ids == -1
    assert padding.sum() == 24 - sum(lengths)
    assert not row.target_mask[padding].any()
    types = [(a.dtype.name, a.shape) for a in vars(row).values()]
    assert types == [("int32", (24,)), ("int32", (24,)), ("bool", (24,)), ("int32", (24,)), ("int32", (24,))]

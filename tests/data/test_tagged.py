"""JSON-able stand-ins for Python values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.data.tagged import decode, encode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.integers() | st.text() | st.just("__tuple__") | st.tuples(st.integers(), st.text())
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.sets(st.integers() | st.text()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)


@settings(deadline=None)
@given(VALUES)
def test_values_survive_json(value):
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_what_json_keeps_is_encoded_as_itself():
    plain = {"a": [1, 2.5, "x", None, True], "b": {"c": []}}
    assert encode(plain) == plain


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="bytes"):
        encode({"a": b"x"})

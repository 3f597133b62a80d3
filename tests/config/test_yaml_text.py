"""Scalars as YAML 1.2 reads them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.config.yaml_text import dump_yaml, load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("-2e+3", -2000.0),
        ("1.e-6", 1e-6),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("+3", 3),
        ("1_000_000", 1_000_000),
        ("-0.0", 0.0),
        (".inf", math.inf),
        ("true", True),
        ("None", None),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1e-3, no]", [1e-3, "no"]),
        ("no", "no"),
        ("on", "on"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("0x1f", "0x1f"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("'1e-6'", "1e-6"),
    ],
)
def test_a_scalar_is_read_as_a_person_means_it(text, value):
    read, problems = load_yaml(text)
    assert (read, problems) == (value, [])
    assert type(read) is type(value)


def test_merged_keys_may_be_overridden_without_counting_as_given_twice():
    value, problems = load_yaml("base: &base {a: 1, b: 2}\nother:\n  <<: *base\n  b: 3\n")
    assert value["other"] == {"a": 1, "b": 3}
    assert problems == []


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="\ufeff")),
    st.from_regex(r"[-+.0-9eE_:]{1,8}", fullmatch=True),
)


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text("abc1~-"), inner), max_leaves=8))
def test_what_is_written_is_read_back(value):
    assert load_yaml(dump_yaml(value)) == (value, [])

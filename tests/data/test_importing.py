"""Whether code of the user's own can be called, found without calling it."""

from __future__ import annotations

import pytest

from forge_core.data.importing import misfit


@pytest.mark.parametrize("wrong", [{"arguments": (1, 2, 3)}, {"arguments": (1,), "keywords": {"third": 3}}])
def test_what_does_not_fit_a_function_is_said_without_calling_it(wrong: dict):
    def two(first, second=0):
        raise AssertionError("called")

    assert isinstance(misfit(two, *wrong["arguments"], **wrong.get("keywords", {})), TypeError)
    assert misfit(two, 1) is None
    assert misfit(two, 1, second=2) is None
    assert misfit(dict, 1, 2, 3) is None, "it does not say what it takes"
    assert isinstance(misfit(3), TypeError), "no function at all"

"""Requests that cannot be served are refused by name, before any work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forge_core.data_model import GenerationRequest, SamplingParams
from forge_core.generation.base import check_requests

GOOD = GenerationRequest("run/1", (1, 2, 3), 0, SamplingParams(max_new_tokens=7))


def check(request: GenerationRequest) -> None:
    check_requests([GOOD, request], max_positions=10, vocab_size=20)


def test_a_request_that_just_fits_is_accepted():
    check(GOOD)


def test_a_request_beyond_the_models_positions_names_request_and_numbers():
    with pytest.raises(ValueError, match=r"run/2.*prompt \(4 tokens\).*\(7\) is 11.*10 positions"):
        check(replace(GOOD, request_id="run/2", prompt_ids=(1, 2, 3, 4)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "no token"),
        ({"prompt_ids": (1, 20)}, r"\[1, 20\].*20 tokens"),
        ({"prompt_ids": (-1, 2)}, r"\[-1, 2\]"),
        ({"sampling": SamplingParams(max_new_tokens=0)}, "max_new_tokens is 0"),
        ({"sampling": SamplingParams(temperature=-1, max_new_tokens=1)}, "temperature is -1"),
        ({"sampling": SamplingParams(temperature=float("nan"), max_new_tokens=1)}, "temperature is nan"),
        ({"sampling": SamplingParams(top_p=0.0, max_new_tokens=1)}, "top_p 0.0"),
        ({"sampling": SamplingParams(min_p=1.5, max_new_tokens=1)}, "min_p 1.5"),
    ],
)
def test_an_impossible_request_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check(replace(GOOD, **change))

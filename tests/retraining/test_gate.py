"""The gate: every check, on both sides of its threshold."""

from __future__ import annotations

import dataclasses

import pytest

from forge_core.config.retrain_config import GateSection
from forge_core.evaluation.gate import Measured, judge
from forge_core.evaluation.results import Comparison, Summary
from forge_core.evaluation.statistics import Estimate


def summary(mean: float, tokens: float) -> Summary:
    return Summary(Estimate(mean, mean - 0.1, mean + 0.1, 50), {1: mean}, tokens, 0.0, 50, 0)


def measured(bound: float = 0.05, tokens: float = 12.0, **changes: float | None) -> Measured:
    gain = Estimate(0.1, bound - 0.02, 0.2, 50)
    good = Measured(
        summary(0.6, tokens), summary(0.5, 10.0), Comparison(gain, bound, 30, 10, 10, 0.01), kl=0.1,
        tokens_per_second=900.0, gpu_seconds=3600.0,
    )  # fmt: skip
    return dataclasses.replace(good, **changes)


ALL = GateSection(min_gain=0.02, max_length_growth=0.3, max_kl=0.5, min_throughput=500.0, max_gpu_seconds=7200.0)


def test_a_candidate_that_is_better_in_every_respect_passes_and_every_check_says_why():
    verdict = judge(ALL, measured())
    assert verdict.passed
    assert [c.name for c in verdict.checks] == ["gain", "length_growth", "kl", "throughput", "gpu_seconds"]
    assert [c.value for c in verdict.checks] == pytest.approx([0.05, 0.2, 0.1, 900.0, 3600.0])
    assert [c.threshold for c in verdict.checks] == [0.02, 0.3, 0.5, 500.0, 7200.0]
    assert all(c.passed and c.why for c in verdict.checks)
    assert verdict.reason == (
        "the mean reward changed by +0.1000 over 50 prompts, with 95% confidence by more than +0.0500: above 0.02"
    )


@pytest.mark.parametrize(
    ("bad", "name", "why"),
    [
        (measured(bound=0.02), "gain", "not above 0.02"),
        (measured(bound=-0.3), "gain", "by more than -0.3000: not above"),
        (measured(tokens=14.0), "length_growth", "14.0 tokens, 10.0 before: 0.4, above 0.3"),
        (measured(kl=0.6), "kl", "0.6, above 0.5"),
        (measured(tokens_per_second=400.0), "throughput", "400, below 500"),
        (measured(gpu_seconds=9000.0), "gpu_seconds", "9000, above 7200"),
    ],
)
def test_one_failed_check_rejects_and_is_the_reason(bad: Measured, name: str, why: str):
    verdict = judge(ALL, bad)
    assert not verdict.passed
    assert [c.name for c in verdict.checks if not c.passed] == [name]
    assert why in verdict.reason


@pytest.mark.parametrize("name", ["kl", "tokens_per_second", "gpu_seconds"])
def test_what_was_not_measured_fails_its_check(name: str):
    verdict = judge(ALL, measured(**{name: None}))
    assert not verdict.passed
    assert "could not be measured" in verdict.reason


def test_bounds_that_are_not_set_are_not_checked():
    verdict = judge(GateSection(max_length_growth=None), measured(tokens=1000.0, kl=None, tokens_per_second=None))
    assert [c.name for c in verdict.checks] == ["gain"]
    assert verdict.passed


def test_an_equal_policy_replaces_nothing():
    assert not judge(GateSection(), measured(bound=0.0)).passed

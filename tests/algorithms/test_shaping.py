"""The overlong penalty and the adaptive weight of the KL penalty."""

from __future__ import annotations

import pytest

from forge_core.algorithms.shaping import AdaptiveKL, overlong_penalty


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (500, -1.0)]
)
def test_the_penalty_falls_along_the_buffer_and_stays_there(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 100, 20) == pytest.approx(penalty)
    assert overlong_penalty(length, 100, 20, factor=0.5) == pytest.approx(penalty / 2)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_that_makes_no_sense_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="between 1 and max_length=100"):
        overlong_penalty(5, 100, buffer)


def test_the_weight_moves_by_at_most_two_percent_a_step_and_settles_at_the_target() -> None:
    controller = AdaptiveKL(0.2)
    assert controller.adapt(1.0, 1e9) == pytest.approx(1.02)
    assert controller.adapt(1.0, 0.0) == pytest.approx(0.98)
    assert controller.adapt(1.0, 0.2) == 1.0
    beta = 1.0
    for _ in range(2000):  # a policy whose KL is the smaller the larger the weight
        beta = controller.adapt(beta, 0.05 / beta)
    assert 0.05 / beta == pytest.approx(0.2, rel=1e-3)

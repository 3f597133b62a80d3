"""What a role's last state says: who was sent away comes back, who was stopped does not."""

from __future__ import annotations

import pytest

from flows.role_session import REFUSED, final_state
from flows.stopping import SIGTERM, STOP
from forge_core.runs.sampler_check import SamplerMismatch
from forge_core.runs.trainer_session import DriftError
from forge_core.stop import Stopped


@pytest.mark.parametrize(("reason", "state"), [(SIGTERM, ("CRASHED", "Preempted")), (STOP, ("CANCELLED", "Cancelled"))])
def test_a_role_whose_machine_is_taken_crashed_and_one_that_was_stopped_is_cancelled(
    reason: str, state: tuple[str, str]
) -> None:
    found = final_state("scorer", Stopped(reason))
    assert found is not None
    assert (found.type.value, found.name) == state
    assert reason in (found.message or "")


@pytest.mark.parametrize("error", [SamplerMismatch("other kernels"), DriftError("another machine")])
def test_what_would_end_the_same_way_again_is_no_reason_to_start_a_role_again(error: Exception) -> None:
    found = final_state("trainer", error)
    assert found is not None
    assert (found.name, found.message) == (REFUSED, f"{type(error).__name__}: {error}")

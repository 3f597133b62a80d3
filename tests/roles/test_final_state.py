"""What a role's last state says: who was sent away comes back, who was stopped does not."""

from __future__ import annotations

import pytest

from flows.role_session import final_state
from flows.stopping import SIGTERM, STOP
from forge_core.stop import Stopped


@pytest.mark.parametrize(("reason", "state"), [(SIGTERM, ("CRASHED", "Preempted")), (STOP, ("CANCELLED", "Cancelled"))])
def test_a_role_whose_machine_is_taken_crashed_and_one_that_was_stopped_is_cancelled(
    reason: str, state: tuple[str, str]
) -> None:
    found = final_state("scorer", Stopped(reason))
    assert found is not None
    assert (found.type.value, found.name) == state
    assert reason in (found.message or "")

"""Which failures of a task are worth another attempt."""

from __future__ import annotations

import pytest
from prefect.states import Failed

from forge_core.algorithms.fates import StalenessError
from forge_core.overdue import Overdue
from forge_core.stop import Stopped
from forge_core.store import CorruptObject, IdentityError, LedgerError, NotFound, StoreError
from tasks.options import is_io_error


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (StoreError("the bucket did not answer"), True),
        (OSError("no route to host"), True),
        (TimeoutError("slow"), True),
        (Overdue("roles.wait_s is up"), False),
        (NotFound("s3://b", "key"), False),
        (IdentityError("another request"), False),
        (CorruptObject("torn"), False),
        (LedgerError("a gap"), False),
        (StalenessError("too old"), False),
        (Stopped("Ctrl-C"), False),
        (ValueError("a bug"), False),
    ],
)
def test_only_the_store_and_the_network_are_tried_again(error: Exception, again: bool) -> None:
    assert is_io_error(None, None, Failed(data=error)) is again

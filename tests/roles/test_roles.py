"""Four kinds of processes that meet in an S3 bucket make the run that one flow makes, whatever happens to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.server import ServerHandle
from tests.faults.processes import Forge, write_config
from tests.faults.stored import Stored, check_complete, check_same_run
from tests.runs.harness import TINY

pytestmark = [pytest.mark.server, pytest.mark.engine]

STEPS = 5
CONFIG: dict[str, Any] = TINY | {
    "steps": STEPS,
    "max_staleness": 1,
    "grpo": {"n_samples": 4, "beta": 0.1},
    "roles": {"claim_timeout_s": 5, "wait_s": 120},
}
Start = Callable[..., Forge]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Forge] = []

    def started(*arguments: object, folder: Path = tmp_path) -> Forge:
        running.append(Forge(folder, *arguments))
        return running[-1]

    yield started
    for forge in running:
        forge.end()


def test_roles_over_s3_make_the_run_of_one_flow_bit_for_bit(
    start: Start, tmp_path: Path, s3_store_uri: str, prefect_server: ServerHandle
) -> None:
    store = f"{s3_store_uri}-roles"
    early = [start("role", role, "tiny", "--store", store) for role in ("scorer", "generator")]
    config = write_config(tmp_path / "one", CONFIG)
    one = start("train", config, folder=tmp_path / "one")
    assert one.wait() == 0, one.output
    created = start("create", config, "--store", store)
    assert created.wait() == 0, created.output
    late = [start("role", role, "tiny", "--store", store) for role in ("trainer", "reference", "generator")]
    for forge in (*early, *late):
        assert forge.wait() == 0, forge.output
    check_same_run(Stored(store), Stored(tmp_path / "one" / "store"), STEPS)
    check_complete(Stored(store), STEPS, CONFIG["max_staleness"])

"""``kill -9`` of the process group at random moments, then ``forge resume``.

A start of ``forge`` takes some ten seconds of imports on two cores, and each kill needs a start: these tests take one
or two minutes.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from flows.server import ServerHandle
from tests.faults.killing import STEPS, Life, kill_and_resume, killable, start
from tests.faults.processes import Forge
from tests.faults.stored import Stored, check_complete, check_same_run

pytestmark = [pytest.mark.server, pytest.mark.engine]


def show(lives: list[Life]) -> None:
    for life in lives:
        ended = "finished" if life.lost_s is None else "killed"
        print(f"{ended} after {life.ran_s:.1f} s with {life.files} files and {life.committed} steps stored")


def test_a_killed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, prefect_server: ServerHandle) -> None:
    """Over a minute: four starts beside the uninterrupted run."""
    config = killable("oldest", max_staleness=1)
    uninterrupted = start(tmp_path / "whole", config)
    try:
        show(kill_and_resume(tmp_path / "killed", random.Random(1), kills=3, config=config))
        assert uninterrupted.wait() == 0, uninterrupted.output
    finally:
        uninterrupted.end()
    whole, killed = Stored(tmp_path / "whole/store"), Stored(tmp_path / "killed/store")
    check_same_run(killed, whole, STEPS)
    check_complete(killed, STEPS, max_staleness=1)
    status = Forge(tmp_path / "killed", "resume", "tiny", "--store", tmp_path / "killed/store")
    assert status.wait() == 0, "a finished run is resumed by doing nothing"


def test_a_killed_run_with_newest_weights_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Each process starts a Prefect server of its own, which must die with it."""
    lives = kill_and_resume(tmp_path, random.Random(2), 2, killable("newest", max_staleness=2), own_server=True)
    show(lives)
    check_complete(Stored(tmp_path / "store"), STEPS, max_staleness=2)

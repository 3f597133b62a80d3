"""Killing a run at random moments and resuming it, with what must hold each time."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.processes import Forge, write_config
from tests.faults.stored import Stored, check_untouched
from tests.runs.harness import TINY

STEPS = 12


def killable(version: str, max_staleness: int) -> dict[str, Any]:
    """The tiny run, long enough to be killed in: ``version`` and ``max_staleness`` as in the configuration."""
    return TINY | {
        "steps": STEPS,
        "max_staleness": max_staleness,
        "rollout": TINY["rollout"] | {"version": version},
        "checkpoint": {"interval": 3},
        "eval": {"prompts": 8, "interval": 4},
    }


@dataclass(frozen=True)
class Kill:
    """One kill: how much was stored, and for how long nothing had been (the work that it cost); seconds."""

    files: int
    committed: int
    lost_s: float
    ran_s: float


def start(folder: Path, config: dict[str, Any], own_server: bool = False) -> Forge:
    """``forge train`` the first time, ``forge resume`` after that."""
    if (folder / "store/runs/tiny/run.json").exists():
        return Forge(folder, "resume", "tiny", "--store", folder / "store", own_server=own_server)
    return Forge(folder, "train", write_config(folder, config), own_server=own_server)


def kill_at_random(forge: Forge, run: Stored, rng: random.Random, most_files: int) -> Kill:
    """Kill the process group once it has stored a random number of further files, at most ``most_files``.

    A step stores some 25 files, and each may be the last before the kill: an episode file without its manifest, weights
    without their training table, a commit without its checkpoint.
    """
    before = len(run.files())
    wanted = before + rng.randint(1, most_files)
    forge.wait_until(lambda: len(run.files()) >= wanted, poll_s=0.001)
    time.sleep(rng.uniform(0, 0.05))
    forge.kill()
    killed = time.time()
    left = forge.orphans()
    assert not left, f"left alive by the kill: {left}"
    newest = max((path.stat().st_mtime for path in run.files()), default=killed)
    return Kill(len(run.files()), run.head(), killed - newest, time.monotonic() - forge.started)


def kill_and_resume(
    folder: Path, rng: random.Random, kills: int, config: dict[str, Any], own_server: bool = False
) -> list[Kill]:
    """Start a run, kill it ``kills`` times and let the last resume finish; checks every resume."""
    run, done = Stored(folder / "store"), []
    before: dict[str, str] = {}
    for _ in range(kills):
        forge = start(folder, config, own_server)
        try:
            done.append(kill_at_random(forge, run, rng, most_files=STEPS * 25 // kills))
        finally:
            forge.end()
        after = run.snapshot()
        check_untouched(before, after)
        before = after
    last = start(folder, config, own_server)
    try:
        assert last.wait() == 0, last.output
    finally:
        last.end()
    check_untouched(before, run.snapshot())
    return done

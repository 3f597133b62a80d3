"""Killing a run at random moments and resuming it, with what must hold each time."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.processes import START_S, Forge, write_config
from tests.faults.stored import Stored, check_untouched
from tests.runs.harness import TINY

STEPS = 12
FILES_PER_STEP = 22  # about


def killable(version: str, max_staleness: int) -> dict[str, Any]:
    """The tiny run, long enough to be killed in: ``version`` and ``max_staleness`` as in the configuration."""
    return TINY | {
        "steps": STEPS,
        "max_staleness": max_staleness,
        "rollout": TINY["rollout"] | {"version": version},
        "checkpoint": {"interval": 3},
        "eval": {"prompts": 8, "interval": 4},
    }


@dataclass
class Life:
    """One process that worked on the run, until it was killed or had finished it. Times in seconds."""

    files: int  # stored at the end, and so on
    committed: int
    ran_s: float
    first_work_s: float | None  # from its start to the first object that it stored
    first_commit_s: float | None  # and to the first training step that it committed
    replayed: int  # committed steps after the checkpoint that the next process starts from
    lost_s: float | None = None  # how long before the kill the newest object was stored: the work that the kill cost


def start(folder: Path, config: dict[str, Any], own_server: bool = False) -> Forge:
    """``forge train`` the first time, ``forge resume`` after that."""
    if (folder / "store/runs/tiny/run.json").exists():
        return Forge(folder, "resume", "tiny", "--store", folder / "store", own_server=own_server)
    return Forge(folder, "train", write_config(folder, config), own_server=own_server)


def live(forge: Forge, run: Stored, files: int | None) -> Life:
    """Watch the process until it has stored ``files`` further files (None: until it has ended)."""
    stored, committed = len(run.files()), run.head()
    first_work_s = first_commit_s = None
    while forge.process.poll() is None and (files is None or len(run.files()) < stored + files):
        now = time.monotonic() - forge.started
        assert now < START_S, f"nothing within {START_S:.0f} s:\n{forge.output}"
        if first_work_s is None and len(run.files()) > stored:
            first_work_s = now
        if first_commit_s is None and run.head() > committed:
            first_commit_s = now
        time.sleep(0.001 if files else 0.02)
    return Life(0, 0, time.monotonic() - forge.started, first_work_s, first_commit_s, 0)


def kill_at_random(forge: Forge, run: Stored, rng: random.Random, most_files: int) -> Life:
    """Kill the process group once it has stored a random number of further files, at most ``most_files``.

    Each file may be the last before the kill: episodes without their manifest, weights without their training table,
    a commit without its checkpoint.
    """
    life = live(forge, run, rng.randint(1, most_files))
    time.sleep(rng.uniform(0, 0.05))
    forge.kill()
    killed = time.time()
    left = forge.orphans()
    assert not left, f"left alive by the kill: {left}"
    life.lost_s = killed - max((path.stat().st_mtime for path in run.files()), default=killed)
    return life


def finish(forge: Forge, run: Stored) -> Life:
    """Let the process finish the run."""
    life = live(forge, run, None)
    assert forge.wait() == 0, forge.output
    return life


def kill_and_resume(
    folder: Path, rng: random.Random, kills: int, config: dict[str, Any], own_server: bool = False
) -> list[Life]:
    """Start a run, kill it ``kills`` times and let the last resume finish; every resume is checked."""
    run, lives = Stored(folder / "store"), []
    before: dict[str, str] = {}
    for number in range(kills + 1):
        forge = start(folder, config, own_server)
        try:
            life = (
                kill_at_random(forge, run, rng, STEPS * FILES_PER_STEP // kills)
                if number < kills
                else finish(forge, run)
            )
        finally:
            forge.end()
        after = run.snapshot()
        check_untouched(before, after)
        before = after
        life.files, life.committed, life.replayed = len(after), run.head(), run.head() - run.checkpointed()
        lives.append(life)
    return lives

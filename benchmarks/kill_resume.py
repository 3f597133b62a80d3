"""``kill -9`` at random moments, then ``forge resume``: is anything lost or changed, and what does it cost?

    .venv/bin/python -m benchmarks.kill_resume --kills 10 --seed 0

Claims: a run that was killed and resumed is the run that was not, bit for bit (``rollout.version: oldest``); with
``newest`` no training step is lost or repeated and every planned episode is trained or dropped exactly once; no
finished shard is made again, no committed step published again, no process survives the kill. Runs alternate between
the two settings and are killed three times each. Every process starts a Prefect server of its own, as a user's does.

Figures: ``lost_s``, how long before a kill the newest object had been stored (the work that a kill costs);
``first_work_s`` and ``first_commit_s``, from the start of the resuming process to its first stored object and its first
committed training step; ``replayed``, committed steps after the newest checkpoint, which are trained again from
stored objects. The model is tiny, so the times are those of the machinery: imports, server, replay.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import provenance, write
from tests.faults.killing import STEPS, Life, finish, kill_and_resume, killable, start
from tests.faults.stored import Stored, check_complete, check_same_run

SETTINGS = {"oldest": 1, "newest": 2}  # rollout.version: max_staleness
KILLS_PER_RUN = 3


def uninterrupted(folder: Path) -> Stored:
    """The ``oldest`` run that nobody kills."""
    forge = start(folder, killable("oldest", SETTINGS["oldest"]), own_server=True)
    finish(forge, Stored(folder / "store"))
    return Stored(folder / "store")


def killed_runs(folder: Path, kills: int, seed: int, whole: Stored) -> Iterator[tuple[str, list[Life]]]:
    """``rollout.version`` and the processes of each run; every run is checked when it has finished."""
    rng, done = random.Random(seed), 0
    while done < kills:
        version = list(SETTINGS)[done // KILLS_PER_RUN % len(SETTINGS)]
        here = folder / f"killed-{done}"
        times = min(KILLS_PER_RUN, kills - done)
        lives = kill_and_resume(here, rng, times, killable(version, SETTINGS[version]), own_server=True)
        check_complete(Stored(here / "store"), STEPS, SETTINGS[version])
        if version == "oldest":
            check_same_run(Stored(here / "store"), whole, STEPS)
        done += times
        print(f"{done} of {kills} kills: all promises held", flush=True)
        yield version, lives


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "max": round(max(values), 3)}


def summary(runs: list[tuple[str, list[Life]]]) -> dict[str, Any]:
    killed = [life for _, lives in runs for life in lives if life.lost_s is not None]
    resumed = [life for _, lives in runs for life in lives[1:]]
    return {
        "kills": len(killed),
        "runs": len(runs),
        "steps_per_run": STEPS,
        "lost_s": spread([life.lost_s for life in killed if life.lost_s is not None]),
        "replayed": spread([float(life.replayed) for life in killed]),
        "first_work_s": spread([life.first_work_s for life in resumed if life.first_work_s]),
        "first_commit_s": spread([life.first_commit_s for life in resumed if life.first_commit_s]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    machine = provenance()
    with tempfile.TemporaryDirectory(prefix="forge-kills-") as folder:
        whole = uninterrupted(Path(folder) / "whole")
        runs = list(killed_runs(Path(folder), args.kills, args.seed, whole))
    detail = [{"version": version, "processes": [asdict(life) for life in lives]} for version, lives in runs]
    write("kill_resume", {"machine": machine, "seed": args.seed, **summary(runs), "detail": detail})


if __name__ == "__main__":
    main()

"""``kill -9`` of processes of every kind at random moments: is anything lost, and what does each kind cost?

    .venv/bin/python -m benchmarks.faults --kills 100 --seed 0

Claims, checked after every run: the ledger verifies, every planned episode is once trained or dropped, no process and
no temporary file is left, and (``rollout.version: oldest``, transformers generator) the run equals the uninterrupted
one bit for bit. Kinds: one flow with two trainer ranks, one of its ranks, each role, a vLLM engine, the Prefect server,
the S3 server. Killed processes and servers are started again at once, as their supervisor would.

Figures of each kill: ``lost_s``, since the killed kind had stored its newest object (an upper bound of the lost work:
waiting counts); ``recovery_s``, from the kill to the next such object: the start of processes and the replay included,
and of a server its start. Tiny models, so the times are those of the machinery.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import provenance, write
from tests.faults.servers import S3, Prefect, Server
from tests.faults.stored import Stored, check_complete, check_same_run
from tests.faults.supervised import ROLES, Kill, Supervised
from tests.runs.harness import TINY

STEPS = 16
SMALL: dict[str, Any] = TINY | {
    "steps": STEPS,
    "max_staleness": 1,
    "eval": {"prompts": 0},
    "checkpoint": {"interval": 3},
}
RANKS = SMALL | {
    "training": TINY["training"] | {"token_budget": 128},
    "parallelism": {"data_parallel_shard_degree": 2},
}
IN_ROLES = SMALL | {"grpo": {"n_samples": 4, "beta": 0.1}, "roles": {"claim_timeout_s": 5, "wait_s": 200}}
VLLM = SMALL | {
    "model": TINY["model"] | {"hidden_size": 64, "head_dim": 32},
    "generator": {"backend": "vllm", "threads": 1},
    "rollout": TINY["rollout"] | {"version": "newest"},
}
FLOW = ("flow",)
SCENES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {  # configuration, processes, kinds
    "flow": (RANKS, FLOW, ("flow", "trainer rank")),
    "roles": (IN_ROLES, ROLES, ROLES),
    "vllm": (VLLM, FLOW, ("vllm engine",)),
}


def deck(rng: random.Random) -> dict[str, list[str]]:
    """Every kind once, in random order: the kinds that are killed in a run of each scene."""
    kinds = {scene: list(own) for scene, (_, _, own) in SCENES.items()}
    for server in ("prefect server", "s3 server"):
        kinds[rng.choice(["flow", "roles"])].append(server)
    for order in kinds.values():
        rng.shuffle(order)
    return kinds


class Bench:
    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng, self.runs = folder, rng, 0
        self.servers: dict[str, Server] = {s.name: s for s in (Prefect(folder / "prefect"), S3(folder / "s3"))}
        os.environ.update(self.servers["s3 server"].environment)
        self.whole = {scene: self.uninterrupted(scene) for scene in ("flow", "roles")}

    def run(self, scene: str, processes: tuple[str, ...]) -> Supervised:
        self.runs += 1
        environment, store = self.servers["prefect server"].environment, f"s3://forge/run-{self.runs}"
        return Supervised(self.folder / f"r{self.runs}", SCENES[scene][0], processes, environment, store)

    def uninterrupted(self, scene: str) -> Stored:
        run = self.run(scene, FLOW)
        try:
            run.finish()
        finally:
            run.end()
        return Stored(run.uri)

    def killed(self, scene: str, kinds: list[str]) -> Iterator[Kill]:
        """One run, with one kill of each of ``kinds`` that it lives long enough for."""
        run = self.run(scene, SCENES[scene][1])
        try:
            for kind in kinds:
                target = run.look() + self.rng.randint(0, 2) if run.running else 1
                run.until(lambda steps: steps >= target and run.has(kind))  # noqa: B023
                time.sleep(self.rng.uniform(0, 0.5))
                if run.has(kind) and not run.finished():
                    yield run.kill(kind, self.servers.get(kind))
            run.finish()
        finally:
            run.end()
        check_complete(Stored(run.uri), STEPS, 1)
        if scene in self.whole:
            check_same_run(Stored(run.uri), self.whole[scene], STEPS)

    def kills(self, wanted: int, minutes: float) -> Iterator[Kill]:
        done, deadline = 0, time.monotonic() + 60 * minutes
        while done < wanted and time.monotonic() < deadline:
            for scene, kinds in deck(self.rng).items():
                kills = list(self.killed(scene, kinds[: wanted - done]))  # counted once the run is found whole
                done += len(kills)
                print(f"{done} of {wanted} kills: {kills}", flush=True)
                yield from kills


def summary(kills: list[Kill]) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float] | None:
        return {"median": round(median(values), 2), "max": round(max(values), 2)} if values else None

    return {
        "kills": len(kills),
        "lost_s": spread([kill.lost_s for kill in kills]),
        "recovery_s": spread([kill.recovery_s for kill in kills if kill.recovery_s is not None]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no further round of kinds after this long"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    machine, kills = provenance(), []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder), random.Random(args.seed))
        try:
            for kill in bench.kills(args.kills, args.minutes):
                kills.append(kill)
        finally:
            for server in bench.servers.values():
                server.stop()
            write("faults", figures(kills, machine, args.seed))


def figures(kills: list[Kill], machine: dict[str, Any], seed: int) -> dict[str, Any]:
    by_kind = {kind: summary([k for k in kills if k.kind == kind]) for kind in sorted(Counter(k.kind for k in kills))}
    detail = [asdict(kill) for kill in kills]
    return {"machine": machine, "seed": seed, **summary(kills), "by_kind": by_kind, "detail": detail}


if __name__ == "__main__":
    main()

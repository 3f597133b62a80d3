"""``kill -9`` of a worker, alone and together with the flow that it runs, at random moments: what does it cost?

    .venv/bin/python -m benchmarks.worker_kills --kills 10 --seed 0

A real Prefect server, ``forge deploy``, real workers, ``prefect deployment run``; after each kill another worker is
started at once, as its supervisor would. A flow goes on without its worker; a flow that died with it is taken for
crashed after three missed heartbeats and started again by the automation. Checked after every run: the ledger verifies,
every planned episode is once trained or dropped, the flow run is completed, and (``rollout.version: oldest``) the run
equals the one that nobody disturbed, bit for bit.

Figures of each kill: ``lost_s``, since the run had committed its last step; ``recovery_s``, from the kill to the next.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults import figures
from benchmarks.machine import provenance, write
from forge_core.store import open_store
from tests.deploying.conftest import Operator, kill_all
from tests.faults.stored import Stored, check_complete, check_same_run
from tests.faults.supervised import Kill
from tests.fixtures_prefect import forge_server

STEPS = 40
RUN = "worked"
OVERRIDES: dict[str, Any] = {
    "run.id": RUN, "steps": STEPS, "rollout.version": "oldest", "checkpoint.interval": 3, "eval.prompts": 0,
}  # fmt: skip
LIMIT_S = 400.0


class Bench:
    def __init__(self, operator: Operator, folder: Path, rng: random.Random) -> None:
        self.operator, self.folder, self.rng, self.runs = operator, folder, rng, 0
        self.worker = operator.start_worker("trainer")
        self.whole = self.finished(self.begun())

    def begun(self) -> str:
        """A run in a store of its own; id of its flow run."""
        self.runs += 1
        self.operator.store = open_store(str(self.folder / f"store-{self.runs}"))
        self.operator.deploy("--store", self.operator.store.uri)
        return self.operator.run("grpo/quickstart", **OVERRIDES)

    def finished(self, flow_run: str) -> Stored:
        self.operator.wait("the end of the run", lambda: self.operator.ended(flow_run), LIMIT_S)
        state = self.operator.flow_run(flow_run)["state"]
        assert state["type"] == "COMPLETED", state
        stored = Stored(self.folder / f"store-{self.runs}", RUN)
        check_complete(stored, STEPS, 1)
        return stored

    def killed(self, kind: str) -> Kill:
        flow_run, target = self.begun(), self.rng.randint(2, STEPS - 15)
        self.reached(target)
        committed_at = time.monotonic()
        time.sleep(self.rng.uniform(0, 0.5))
        before, at = self.operator.committed(RUN), time.monotonic()
        if kind == "worker":
            self.worker.kill()
        else:
            kill_all([self.worker])
        self.worker = self.operator.start_worker("trainer")
        self.reached(max(before, self.operator.committed(RUN)) + 1)
        recovery = time.monotonic() - at
        check_same_run(self.finished(flow_run), self.whole, STEPS)
        crashes = self.operator.history(flow_run).count("Crashed")
        assert crashes == (kind != "worker"), self.operator.states(flow_run)
        return Kill(kind, before, at - committed_at, recovery)

    def reached(self, steps: int) -> None:
        self.operator.wait(f"{steps} steps", lambda: self.operator.committed(RUN) >= steps, LIMIT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    machine, kills = provenance(), []
    kinds = ["worker", "worker and flow"] * (args.kills // 2)
    with tempfile.TemporaryDirectory(prefix="workers-") as name:
        folder = Path(name)
        (folder / "server").mkdir()
        with forge_server(folder / "server") as server:
            operator = Operator(server, open_store(str(folder / "store-0")), folder)
            try:
                bench = Bench(operator, folder, random.Random(args.seed))
                for kind in kinds:
                    kills.append(bench.killed(kind))
                    print(kills[-1], flush=True)
                    write("worker_kills", figures(kills, machine, args.seed))
            finally:
                kill_all([psutil.Process(w.pid) for w in operator.workers if w.poll() is None])


if __name__ == "__main__":
    main()

"""A further node of a run: it starts its share of the trainer's ranks as often as the first node wants them.

Invariants:
- All it needs is the store and the rendezvous: what to train comes from the first node (see ``launch``).
- It ends when the run has nothing left to do; its ranks never outlive it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from forge_core.config import ConfigError
from forge_core.config.any_config import AnyConfig
from forge_core.devices import Placement, place_trainer, visible_gpus
from forge_core.gpu_leases import lease
from forge_core.processes import ChildGroup
from forge_core.runs.early_end import is_finished
from forge_core.runs.record import load_run
from forge_core.store import Store, layout
from forge_core.training.launch import NODES, RankOptions, Rendezvous, rank_environment, ranks_per_node, torchrun

log = logging.getLogger("forge")
PAUSE_S = 2.0  # between two starts of this node's ranks
POLL_S = 0.5


def join(store: Store, run_id: str, logs: Path, *, timeout_s: float) -> None:
    """Serve the run until it is finished. Raises Overdue when it does not exist after ``timeout_s`` seconds,
    ConfigError when this node cannot be part of it."""
    rendezvous = Rendezvous.of_run(run_id, "")
    if rendezvous.nodes == 1:
        raise ConfigError(f"{NODES} is 1 or not set: set it to the number of nodes (the script of `forge slurm` does)")
    store.wait_for(layout.run_json(run_id), timeout_s=timeout_s)
    start = 0
    while not is_finished(store, record := load_run(store, run_id)):
        placement, held = lease(visible_gpus(), partial(place_trainer, record.config, nodes=rendezvous.nodes))
        if held.warning:
            log.warning(held.warning)
        with closing(held):
            serve(start_ranks(record.config, placement.trainer, rendezvous, logs / f"trainer-{start}.log"))
        time.sleep(PAUSE_S)
        start += 1


def serve(group: ChildGroup) -> None:
    """Until it ends."""
    try:
        while group.alive():  # the last checkpoint follows the last commit: the ranks end with the first node's
            time.sleep(POLL_S)
    finally:
        group.kill()


def start_ranks(config: AnyConfig, gpus: Sequence[str], rendezvous: Rendezvous, log: Path) -> ChildGroup:
    """This node's share of the ranks, on ``gpus`` (none: on the CPU), waiting for the others to meet them."""
    ranks = ranks_per_node(config, rendezvous.nodes)
    options = RankOptions.from_config(config, "cuda" if gpus else "cpu", config.training.threads or 1)
    environment = {**rank_environment(rendezvous, options), **Placement.environment(gpus)}
    return ChildGroup("trainer ranks", torchrun(rendezvous, ranks, options), log=log, env=environment)

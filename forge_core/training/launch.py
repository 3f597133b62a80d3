"""Where the trainer's ranks meet, and the ``torchrun`` command that starts those of one node.

Invariants:
- Ranks of one host meet on the loopback interface, on a port that the launcher chooses: nothing is to be set.
- On several nodes all start the same command, apart from their own address. They share the store and the rendezvous
  (environment ``FORGE_NNODES``, ``FORGE_RDZV_ENDPOINT``, ``FORGE_NODE_ADDRESS``), nothing else: what to train comes
  from the node that runs ``forge train``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_core.config.errors import ConfigError

if TYPE_CHECKING:
    from forge_core.config.any_config import AnyConfig

NODES, ENDPOINT, ADDRESS = "FORGE_NNODES", "FORGE_RDZV_ENDPOINT", "FORGE_NODE_ADDRESS"
PORT = 29500  # of a rendezvous whose endpoint names none
# NCCL's watchdog ends a rank that waits for one that hangs, a few seconds after the limit. By default it does so a
# minute later, which it keeps for a dump, or never: it ends the communicator first, in which the other has a part.
PUNCTUAL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # the process ends, not the communicator
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",  # slept four times, dump or not
}


@dataclass(frozen=True)
class Rendezvous:
    """``endpoint``: host and port of the first node; ``id``: equal on all nodes; ``address``: how the others reach this
    node (None: its host name)."""

    id: str
    nodes: int = 1
    endpoint: str = "127.0.0.1:0"
    address: str | None = "127.0.0.1"

    @classmethod
    def of_run(cls, run_id: str, attempt: str, environ: Mapping[str, str] = os.environ) -> Rendezvous:
        """On one host a rendezvous of this attempt alone; on several nodes the run's, as the environment says."""
        nodes = node_count(environ)
        if nodes == 1:
            return cls(f"{run_id}-{attempt}")
        if not environ.get(ENDPOINT):
            raise ConfigError(
                f"{NODES} is {nodes}, but {ENDPOINT} is not set: set it to the address of the node that runs "
                f"`forge train`, such as node-1:{PORT} (the script of `forge slurm` does)"
            )
        endpoint = environ[ENDPOINT]
        return cls(run_id, nodes, endpoint if ":" in endpoint else f"{endpoint}:{PORT}", environ.get(ADDRESS))


def node_count(environ: Mapping[str, str] = os.environ) -> int:
    """Nodes that share the trainer's ranks. Raises ConfigError when the environment does not say a number."""
    value = environ.get(NODES) or "1"
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{NODES} is {value!r}: set it to the number of nodes, or remove it")
    return int(value)


def apart(config: AnyConfig) -> bool:
    """Whether the trainer works in other processes than the run's own."""
    return config.parallelism.ranks > 1 or config.training.own_process


def ranks_per_node(config: AnyConfig, nodes: int) -> int:
    """Raises ConfigError when the ranks cannot be divided among the nodes."""
    ranks = config.parallelism.ranks
    if ranks % nodes or ranks < nodes:
        raise ConfigError(
            f"parallelism: {ranks} ranks (data_parallel_shard_degree x tensor_parallel_degree x "
            f"pipeline_parallel_degree) cannot be divided among {nodes} nodes: make their product a multiple of {nodes}"
        )
    return ranks // nodes


@dataclass(frozen=True)
class RankOptions:
    """``device``: ``cpu`` or ``cuda`` (rank n of a node takes its n-th visible GPU); ``threads``: CPU threads of a
    rank; the two limits are ``comm.timeout_s`` and ``comm.init_timeout_s``, in seconds."""

    device: str = "cpu"
    threads: int = 1
    timeout_s: float = 300.0
    init_timeout_s: float = 600.0

    @classmethod
    def from_config(cls, config: AnyConfig, device: str, threads: int) -> RankOptions:
        return cls(device, threads, config.comm.timeout_s, config.comm.init_timeout_s)

    def arguments(self) -> list[str]:
        """As ``rank_main`` reads them."""
        values = {"device": self.device, "threads": self.threads}
        limits = {"timeout-s": f"{self.timeout_s:g}", "init-timeout-s": f"{self.init_timeout_s:g}"}
        return [f"--{name}={value}" for name, value in {**values, **limits}.items()]


def torchrun(rendezvous: Rendezvous, ranks: int, options: RankOptions) -> list[str]:
    """The command that starts this node's ``ranks``; none is started again when one ends."""
    address = [f"--local-addr={rendezvous.address}"] if rendezvous.address else []
    launcher = "torch.distributed.run" if rendezvous.nodes > 1 else "forge_core.training.loopback_run"
    return [
        sys.executable,
        "-m",
        launcher,
        f"--nnodes={rendezvous.nodes}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous.endpoint}",
        f"--rdzv-id={rendezvous.id}",
        f"--rdzv-conf=join_timeout={options.init_timeout_s:.0f}",
        *address,
        "--max-restarts=0",
        "-m",
        "forge_core.training.rank_main",
        *options.arguments(),
    ]


def rank_environment(rendezvous: Rendezvous, options: RankOptions) -> dict[str, str | None]:
    """Additions to the environment of ``torchrun``. On one host nothing listens or is looked up beyond loopback."""
    environment: dict[str, str | None] = {"OMP_NUM_THREADS": str(options.threads)}
    environment |= {name: os.environ.get(name, value) for name, value in PUNCTUAL.items()}
    if rendezvous.nodes == 1 and sys.platform == "linux":
        environment |= {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return environment

"""The SLURM script of a run whose trainer spans several nodes.

The first node runs ``forge train`` or ``forge sft``: the run itself, and its share of the trainer's ranks. The others
run ``forge join``, which starts their share as often as it is wanted, and ends with the run. They share the store and
the rendezvous.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass

from forge_core.config.any_config import AnyConfig
from forge_core.config.errors import ConfigError
from forge_core.config.sft_config import SftConfig
from forge_core.devices import place, place_trainer
from forge_core.training.launch import ADDRESS, ENDPOINT, NODES, PORT, RankOptions, Rendezvous, ranks_per_node, torchrun

_SCRIPT = """\
#!/bin/bash
{directives}

# Node 0 runs `forge {command}`, the others `forge join`. Each starts its {ranks} of the trainer's {world} ranks with:
#   {torchrun}
set -euo pipefail
export PATH={path}:$PATH
export RUN_ID={run_id}
export FORGE_STORE={store}
export {nodes_name}={nodes}
export {endpoint_name}="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{port}"

srun --kill-on-bad-exit=1 bash -c '
  export {address_name}="$SLURMD_NODENAME"
  if [ "$SLURM_NODEID" -eq 0 ]; then
    exec forge {command} "$@" run.id="$RUN_ID" store="$FORGE_STORE"
  else
    exec forge join "$RUN_ID"
  fi
' forge {arguments}
"""


@dataclass(frozen=True)
class Cluster:
    """What is asked of SLURM."""

    nodes: int
    gpus_per_node: int
    partition: str | None = None
    shared_filesystem: bool = False


def check_cluster(config: AnyConfig, cluster: Cluster, store: str) -> None:
    """Raise ConfigError unless the run fits on these nodes and each of them reaches ``store``."""
    gpus = tuple(map(str, range(cluster.gpus_per_node)))
    try:
        if isinstance(config, SftConfig):
            place_trainer(config, gpus, nodes=cluster.nodes)
        else:
            place(config, gpus, nodes=cluster.nodes)
    except ConfigError as error:
        if cluster.gpus_per_node:
            raise
        raise ConfigError(f"{error}; or say with --gpus-per-node how many a node has") from error
    if store.startswith("memory://"):
        raise ConfigError(
            f"store: {store} exists in one process only: use s3://bucket/prefix, which every node reaches"
        )
    if not store.startswith("s3://") and not cluster.shared_filesystem:
        raise ConfigError(
            f"store: {store} is a folder, and the nodes share nothing but the store: use store=s3://bucket/prefix, or "
            "say with --shared-filesystem that every node sees this folder"
        )


def slurm_script(config: AnyConfig, cluster: Cluster, store: str, arguments: list[str]) -> str:
    """The script for ``sbatch``. ``arguments``: those of ``forge train`` or ``forge sft`` (configuration file and
    overrides)."""
    kind, command = ("sft", "sft") if isinstance(config, SftConfig) else ("grpo", "train")
    ranks = ranks_per_node(config, cluster.nodes)
    device = "cuda" if cluster.gpus_per_node and config.services.trainer.with_gpus is not False else "cpu"
    started = torchrun(
        Rendezvous("$RUN_ID", cluster.nodes, f"${ENDPOINT}", f"${ADDRESS}"),
        ranks,
        RankOptions.from_config(config, device, config.training.threads or 1),
    )
    return _SCRIPT.format(
        directives="\n".join(_directives(cluster)),
        ranks=ranks,
        world=ranks * cluster.nodes,
        command=command,
        torchrun=" ".join(["python", *started[1:]]),
        path=shlex.quote(os.path.dirname(sys.executable)),
        run_id=shlex.quote(config.run.id) if config.run.id else f'"{kind}-$SLURM_JOB_ID"',
        store=shlex.quote(store),
        nodes_name=NODES,
        nodes=cluster.nodes,
        endpoint_name=ENDPOINT,
        port=PORT,
        address_name=ADDRESS,
        arguments=shlex.join(arguments),
    )


def _directives(cluster: Cluster) -> list[str]:
    gpus = [f"#SBATCH --gpus-per-node={cluster.gpus_per_node}"] if cluster.gpus_per_node else []
    partition = [f"#SBATCH --partition={cluster.partition}"] if cluster.partition else []
    return [
        "#SBATCH --job-name=forge",
        f"#SBATCH --nodes={cluster.nodes}",
        *gpus,
        "#SBATCH --ntasks-per-node=1",
        *partition,
        "#SBATCH --output=forge-%j.log",
    ]

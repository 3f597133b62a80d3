"""Training on several nodes: the script that asks SLURM for them, and what the further nodes run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from flows.commands.common import loaded_config, loaded_sft_config, opened_store
from forge_core.config import ConfigError, store_uri
from forge_core.overdue import Overdue

JOIN_S = 900.0  # the first node has this long to begin the run


def slurm(args: argparse.Namespace) -> int:
    """Print a script for sbatch."""
    from forge_core.training.slurm import Cluster, check_cluster, slurm_script

    config = loaded_sft_config(args) if args.sft else loaded_config(args)
    cluster = Cluster(args.nodes, args.gpus_per_node, args.partition, args.shared_filesystem)
    store = store_uri(args.store, config)
    check_cluster(config, cluster, store)
    if "://" not in store:
        store = str(Path(store).expanduser().absolute())
    print(slurm_script(config, cluster, store, [args.config, *args.overrides]), end="")
    return 0


def join(args: argparse.Namespace) -> int:
    """Start this node's ranks of a run's trainer until the run is finished."""
    from forge_core.runs.joining import join as serve

    logs = Path(tempfile.gettempdir()) / f"forge-{args.run_id}-join"
    print(f"logs of this node's ranks: {logs}", file=sys.stderr)
    try:
        serve(opened_store(args), args.run_id, logs, timeout_s=JOIN_S)
    except Overdue as error:
        raise ConfigError(
            f"{error}: the first node, which runs `forge train` or `forge sft`, did not begin the run"
        ) from error
    return 0

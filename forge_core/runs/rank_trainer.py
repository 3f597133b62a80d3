"""The trainer that a run's configuration asks for: in this process, or in ranks of its own.

Invariant: both have the same methods and read and write the same objects; only where the work is done differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from forge_core.config import ConfigError
from forge_core.config.run_gate import unshared_store
from forge_core.devices import Placement
from forge_core.runs.engines import logs_folder
from forge_core.store import layout
from forge_core.training.launch import RankOptions, Rendezvous, apart, ranks_per_node
from forge_core.training.rank_group import RankGroup
from forge_core.training.settings import TrainerSettings

if TYPE_CHECKING:
    from forge_core.runs.context import RunContext
    from forge_core.training.stored import StoredTrainer

Trainer: TypeAlias = "StoredTrainer | RankGroup"


def build_trainer(ctx: RunContext, settings: TrainerSettings, loss: Any, make_loss: Callable[[], Any]) -> Trainer:
    """A trainer of version 0's model, not set up yet; ``make_loss`` makes one like ``loss`` on a rank. Raises
    ConfigError for ranks that could not reach the store."""
    from forge_core.training.stored import StoredTrainer, TrainerSpec

    ctx.weights_content(0)  # checked against the ledger
    model = ctx.ledger.weights_prefix(0)
    if not apart(ctx.config):
        return StoredTrainer(ctx.store, model, settings, loss, device=ctx.device("trainer"))
    if problem := unshared_store(ctx.config, ctx.store.uri):
        raise ConfigError(problem)
    rendezvous = Rendezvous.of_run(ctx.run_id, ctx.attempt)
    ranks = ranks_per_node(ctx.config, rendezvous.nodes)
    gpus = ctx.placement.trainer
    threads = ctx.config.training.threads or max(1, ctx.cpu_threads // ranks)
    return RankGroup(
        TrainerSpec(ctx.store.uri, model, settings, make_loss),
        ranks,
        loss=loss,
        logs=logs_folder(ctx),
        scratch=layout.weights(ctx.run_id, 0, f"{ctx.attempt}-copy"),
        rendezvous=rendezvous,
        options=RankOptions.from_config(ctx.config, "cuda" if gpus else "cpu", threads),
        environment=Placement.environment(gpus),
        stop=ctx.stop,
    )

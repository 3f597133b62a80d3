"""Everything that can be wrong with a run's input, found before an engine is loaded."""

from __future__ import annotations

from functools import lru_cache

from forge_core.config import RunConfig, validate_for_training
from forge_core.config.run_config import ScratchModel
from forge_core.data.prompts import check_dataset
from forge_core.models.resolve import resolve_model
from forge_core.rewards.resolve import needs_answer, resolve
from forge_core.runs.prompt_checks import check_prompts
from forge_core.store import Ledger, Store


def check_run(config: RunConfig) -> list[str]:
    """Warnings about a run that may start. Raises the error of the first part that may not."""
    return list(_check(config.model_dump_json()))


def with_stored_model(store: Store, run_id: str, config: RunConfig) -> RunConfig:
    """``config`` as a resumed run needs it: once version 0 exists, the model is the stored one and no warm start is
    due. The folder or hub id that the run began with may be gone."""
    ledger = Ledger(store, run_id)
    if ledger.init() is None:
        return config
    return config.model_copy(update={"model": str(store.local_dir(ledger.weights_prefix(0))), "warm_start": None})


def _check_loss(config: RunConfig) -> None:
    """A loss in the user's own file must load before anything else does."""
    if config.loss.name == "custom":
        from forge_core.algorithms.losses import build_loss  # imports torch, which bad input need not wait for

        build_loss(config)


@lru_cache(maxsize=4)  # the command checks before it starts a server, the flow checks again
def _check(config_json: str) -> tuple[str, ...]:
    config = RunConfig.model_validate_json(config_json)
    warnings = validate_for_training(config)
    for function in config.rewards.functions:
        resolve(function.path)
    _check_loss(config)
    assert config.dataset is not None
    answer = any(needs_answer(f.path) for f in config.rewards.functions)
    check_dataset(config.dataset, seed=config.run.seed, needs_answer=answer)
    if config.warm_start is not None:
        check_dataset(config.warm_start.dataset, seed=config.run.seed, needs_answer=True, key="warm_start.dataset")
    if not isinstance(config.model, ScratchModel):
        assert config.model is not None
        resolve_model(config.model)
    return (*warnings, *check_prompts(config))

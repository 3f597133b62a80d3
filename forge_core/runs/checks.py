"""Everything that can be wrong with a run's input, found before an engine is loaded."""

from __future__ import annotations

from functools import lru_cache

from forge_core.config import ConfigError, RunConfig, validate_for_training
from forge_core.config.data_sections import ScratchModel
from forge_core.data.prompts import check_dataset
from forge_core.devices import alone
from forge_core.environments.resolve import check_environment
from forge_core.models.stored import configured_model
from forge_core.observability.backends.custom import check_backend
from forge_core.rewards.identity import check_rewards
from forge_core.rewards.resolve import needs_answer
from forge_core.runs.code import code_changes, code_digests
from forge_core.runs.prompt_checks import check_prompts
from forge_core.runs.record import RunRecord, refuse_generation
from forge_core.runs.reference_session import teacher_folder
from forge_core.store import Ledger, Store
from forge_core.weights.host_cache import keep_published


def check_run(config: RunConfig) -> list[str]:
    """Warnings about a run that may start here. Raises the error of the first part that may not."""
    validate_for_training(config)
    check_rewards(config.rewards.functions)
    check_environment(config)
    return list(_check(config.model_dump_json()))


def with_stored_model(store: Store, run_id: str, config: RunConfig) -> RunConfig:
    """``config`` as a resumed run needs it: once version 0 exists, the model is the stored one and no warm start is
    due. The folder or hub id that the run began with may be gone."""
    ledger = Ledger(store, run_id)
    if ledger.init() is None:
        return config
    model = keep_published(store, ledger.weights_prefix(0))
    return config.model_copy(update={"model": str(model), "warm_start": None})


def check_role(store: Store, record: RunRecord, role: str) -> list[str]:
    """Warnings about one role of a stored run on this machine. Raises ConfigError when its code is not the run's, or
    when the machine lacks what the role needs; the other roles' needs are theirs."""
    refuse_generation(record)
    config = alone(record.config, role)
    if names := ", ".join(code_changes(record.code, code_digests(config))):
        raise ConfigError(
            f"the {role} of run {record.run_id!r} would run other code than the run records ({names}): bring this "
            f"machine to the same code, or accept the change for all roles: forge resume {record.run_id} "
            "--allow-code-change"
        )
    if role in ("trainer", "generator"):
        config = with_stored_model(store, record.run_id, config)
        if role == "generator":
            check_environment(config)
        return list(_check(config.model_dump_json()))
    if role == "scorer":
        check_rewards(config.rewards.functions)
    return validate_for_training(config)


def _check_loss(config: RunConfig) -> None:
    """A loss in the user's own file must load before anything else does."""
    if config.loss.name == "custom":
        from forge_core.algorithms.losses import check_loss  # imports torch, which bad input need not wait for

        check_loss(config)


@lru_cache(maxsize=4)  # the command checks before it starts a server, the flow checks again
def _check(config_json: str) -> tuple[str, ...]:
    config = RunConfig.model_validate_json(config_json)
    warnings = validate_for_training(config)
    _check_loss(config)
    check_backend(config)
    assert config.dataset is not None
    answer = any(needs_answer(path) for path in config.rewards.paths)
    check_dataset(config.dataset, seed=config.run.seed, needs_answer=answer)
    if config.eval.split and config.eval.prompts:
        evaluated = config.dataset.model_copy(update={"split": config.eval.split})
        check_dataset(evaluated, seed=config.run.seed, needs_answer=answer, key="eval")
    if config.warm_start is not None:
        check_dataset(config.warm_start.dataset, seed=config.run.seed, needs_answer=True, key="warm_start.dataset")
    if not isinstance(config.model, ScratchModel):
        configured_model(config)
    if config.distils:
        teacher_folder(config)
    return (*warnings, *check_prompts(config))

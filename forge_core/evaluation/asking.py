"""What an evaluation is asked for: which policies, with whose prompts and rewards."""

from __future__ import annotations

from dataclasses import dataclass

from forge_core.config import ConfigError, RunConfig, load_config, store_uri
from forge_core.config.overrides import Overrides
from forge_core.evaluation.policies import MODEL, Policy, find_policy
from forge_core.runs.code import check_named_code
from forge_core.runs.record import load_run, refuse_supervised
from forge_core.store import Store, open_store


@dataclass(frozen=True)
class Question:
    """``policies``: the one to evaluate, then the one that it is compared with, if any."""

    store: Store
    config: RunConfig
    policies: list[Policy]

    @property
    def run_id(self) -> str:
        """The run that the evaluation belongs to, for requests to stop."""
        version = self.policies[0].version
        return version.run_id if version else "evaluation"

    @property
    def subject(self) -> str:
        """The name of the model in the registry, or else of what is evaluated."""
        name = self.policies[0].name
        return name.removeprefix(MODEL).partition("/")[0] if name.startswith(MODEL) else name


def asked(
    model: str, config: RunConfig | str | None, overrides: Overrides, store: str | None, against: str | None
) -> Question:
    """The evaluation of ``model`` that ``config`` describes; left out: that its run describes. Raises ConfigError,
    ModelError, StoreError."""
    given = None if config is None else load_config(config, overrides)
    place = open_store(store_uri(store, given))
    policies = [find_policy(place, name) for name in (model, against) if name is not None]
    if given is None:
        given = load_config(_own_config(place, policies[0]), overrides)
    return Question(place, given, policies)


def _own_config(store: Store, policy: Policy) -> RunConfig:
    if policy.version is None:
        raise ConfigError(
            f"{policy.name} is a model folder, which does not say what it is to be evaluated on: give the "
            "configuration of a run (--config)"
        )
    record = load_run(store, policy.version.run_id)
    refuse_supervised(record, "name whose prompts and rewards to use with --config FILE, a configuration of GRPO")
    recorded = None if record.parent else record.code  # a run with a parent records no code that it does not run
    check_named_code(record.run_id, record.config, record.config, "evaluate", recorded)
    return record.config

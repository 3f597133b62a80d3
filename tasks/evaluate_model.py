"""Evaluate model: sample and grade the held-out prompts with one pinned policy, unless that was done before."""

import logging

from prefect import task

from forge_core.config import RunConfig
from forge_core.evaluation.evaluating import evaluate_policy
from forge_core.evaluation.policies import Policy
from forge_core.stop import StopToken
from forge_core.store import open_store
from tasks.options import OPTIONS


@task(name="evaluate-model", task_run_name="evaluate {policy.name}", **OPTIONS)
def evaluate_model(store: str, config: RunConfig, policy: Policy, stop: StopToken) -> str:
    """Returns the prefix of the evaluation."""
    return evaluate_policy(open_store(store), config, policy, stop, logging.getLogger("forge").info)

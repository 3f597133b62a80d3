"""From a YAML file and overrides to an ``SftConfig``, and the gate before a supervised run.

Guarantees: as ``loader.py`` and ``run_gate.py`` give them for a GRPO run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.config.errors import ConfigError
from forge_core.config.files import located_backend, located_path
from forge_core.config.loader import folder_of, validated
from forge_core.config.metric_sections import metric_problems
from forge_core.config.overrides import Overrides
from forge_core.config.run_gate import (
    model_problems,
    rank_problems,
    rank_store_problems,
    schedule_warnings,
    store_warnings,
)
from forge_core.config.sft_config import SftConfig


def load_sft_config(source: str | Path | Mapping[str, Any] | SftConfig, overrides: Overrides = ()) -> SftConfig:
    """The configuration of a YAML file (or of a mapping, or of a configuration), with overrides applied.

    Raises ``ConfigError`` with every problem found, each as ``key: what is wrong: what would be right``.
    """
    config = validated(SftConfig, source, overrides)
    folder = folder_of(source)
    roots = [Path.cwd(), *([folder.absolute()] if folder else [])]
    tree = config.model_dump(mode="json")
    tree["model"] = located_path(tree["model"], roots)
    for dataset in filter(None, (tree["dataset"], tree["validation"]["dataset"])):
        _locate(dataset, roots)
    located_backend(tree, roots)
    return SftConfig.model_validate(tree)


def _locate(dataset: dict[str, Any], roots: list[Path]) -> None:
    """Write the files of a data set, and of those that it mixes, in full."""
    dataset["path"] = located_path(dataset["path"], roots)
    for part in dataset["mixture"]:
        _locate(part, roots)


def validate_for_sft(config: SftConfig, gpus: int | None = None) -> list[str]:
    """Warnings of a configuration that can train; raises ``ConfigError`` for one that cannot.

    ``gpus``: GPUs of this machine; left out: counted.
    """
    from forge_core.devices import place_trainer, visible_gpus

    checks = (_missing, _rows, model_problems, rank_problems, rank_store_problems, _lora)
    problems = [problem for check in checks for problem in check(config)] + metric_problems(config.metric_logging)
    ids = visible_gpus() if gpus is None else tuple(str(index) for index in range(gpus))
    try:
        place_trainer(config, ids)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems, "this configuration cannot train")
    return sft_warnings(config)


def sft_warnings(config: SftConfig) -> list[str]:
    """What is odd about a configuration on any machine, though nothing refuses it."""
    return [*store_warnings(config), *schedule_warnings(config)]


def _missing(config: SftConfig) -> list[str]:
    found = []
    if config.model is None:
        found.append("model: is missing: name a folder or hub id, such as model=Qwen/Qwen3-0.6B")
    if config.dataset is None:
        found.append("dataset: is missing: name what to train on, such as dataset.path=conversations.jsonl")
    return found


def _rows(config: SftConfig) -> list[str]:
    rows, ranks, found = config.rows_per_optimizer_step, config.parallelism.data_parallel_shard_degree, []
    if rows % ranks:
        batch, accumulation = config.training.batch_size, config.training.gradient_accumulation_steps
        found.append(
            f"training.batch_size: {batch} x training.gradient_accumulation_steps {accumulation} = {rows} rows per "
            f"optimizer step, which {ranks} data-parallel ranks cannot share evenly: use "
            f"training.batch_size={-(-batch // ranks) * ranks}"
        )
    if config.token_budget < config.training.seq_len:
        found.append(
            f"training.token_budget: is {config.token_budget}, less than training.seq_len {config.training.seq_len}: "
            f"one row must fit: use at least {config.training.seq_len}, or leave it out"
        )
    return found


def _lora(config: SftConfig) -> list[str]:
    if config.lora is None:
        return []
    degrees = {
        name: getattr(config.parallelism, name) for name in ("tensor_parallel_degree", "pipeline_parallel_degree")
    }
    return [
        f"parallelism.{name}: is {degree}, but adapters (lora) are not divided that way: set it to 1, and use "
        "parallelism.data_parallel_shard_degree"
        for name, degree in degrees.items()
        if degree > 1
    ]

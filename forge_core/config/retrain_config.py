"""The configuration of a scheduled retraining: which run, on which data, under which name, and when to promote.

Invariants:
- Unknown keys are refused; every field says what it is and in which unit.
- One list of overrides serves both: keys of this model are its own, all others are keys of the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from forge_core.config.errors import ConfigError
from forge_core.config.loader import load_config
from forge_core.config.overrides import Overrides
from forge_core.config.run_config import RunConfig
from forge_core.config.section import Section
from forge_core.config.sft_config import SftConfig
from forge_core.config.sft_loader import load_sft_config
from forge_core.config.yaml_text import load_yaml, yaml_mistake


class GateSection(Section):
    """What a candidate must show before it becomes the production model. A bound that is null is not checked."""

    min_gain: float = Field(
        0.0, description="The mean reward must rise by more than this, compared prompt by prompt (see confidence)."
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="Probability with which the rise is above min_gain (paired bootstrap)."
    )
    max_length_growth: float | None = Field(
        0.5, ge=0, description="Largest growth of the mean response, as a share: 0.5 is half as long again."
    )
    max_kl: float | None = Field(
        None, gt=0, description="Largest KL divergence from the production model, in nats per token of the candidate's."
    )
    min_throughput: float | None = Field(
        None, gt=0, description="Sampled tokens per second of the candidate's evaluation, at least."
    )
    max_gpu_seconds: float | None = Field(
        None, gt=0, description="Budget of training and evaluation: seconds times GPUs (a CPU run counts as one GPU)."
    )


class SftStage(Section):
    """Supervised training before the GRPO run, which then begins with its result."""

    config: str = Field(
        description="YAML file of the supervised run: a path from the working directory, else from this file's folder. "
        "Its model is the production model, or the GRPO run's while there is none."
    )
    data: str | None = Field(
        None, description="Where new conversations arrive, as for data. Left out: the dataset of the supervised run."
    )
    overrides: dict[str, Any] = Field({}, description="Keys of the supervised run to change, as dotted keys.")


class RetrainConfig(Section):
    """Everything that decides a retraining."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="Name of the model in the registry.")
    config: str = Field(
        description="YAML file of the GRPO run: a path from the working directory, else from this file's folder. Its "
        "model is only used while the registry has no production model."
    )
    data: str | None = Field(
        None,
        description="Where new prompts arrive: a folder, a pattern such as incoming/*.jsonl, or anything that "
        "dataset.path takes. Left out: the dataset of the run.",
    )
    overrides: dict[str, Any] = Field({}, description="Keys of the run to change, as dotted keys.")
    sft: SftStage | None = Field(None, description="Supervised training before GRPO. Left out: none.")
    gate: GateSection = Field(GateSection(), description="When a candidate is promoted.")
    distributed: bool = Field(
        False,
        description="Train in roles, with this process as their coordinator, and evaluate through evaluate/run: every "
        "role on its own work pool.",
    )


def load_retrain_config(
    source: str | Path | Mapping[str, Any] | RetrainConfig, overrides: Overrides = ()
) -> tuple[RetrainConfig, RunConfig]:
    """A retraining, and its run with the overrides applied. Raises ConfigError naming what is wrong."""
    tree = source.model_dump() if isinstance(source, RetrainConfig) else _tree(source)
    own, of_run = _split(overrides)
    for key, value in own.items():
        _set(tree, key, value)
    name = str(source) if isinstance(source, str | Path) else "configuration of a retraining"
    try:
        config = RetrainConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([_problem(detail) for detail in error.errors(include_url=False)], name) from None
    folder = Path(source).parent if isinstance(source, str | Path) else Path.cwd()
    located = _located(config, folder)
    run = _with_data(load_config(load_config(located.config, config.overrides), of_run), located.data)
    return located, run


def _located(config: RetrainConfig, folder: Path) -> RetrainConfig:
    """``config`` with its files as they are found from the working directory, or else from ``folder``."""

    def of(stage: RetrainConfig | SftStage) -> dict[str, Any]:
        places = (Path(stage.config), folder / stage.config)
        file = next((place for place in places if place.is_file()), places[0])
        return {"config": str(file), "data": None if stage.data is None else _place(stage.data, folder)}

    sft = config.sft and config.sft.model_copy(update=of(config.sft))
    return config.model_copy(update={**of(config), "sft": sft})


def supervised_run(config: RetrainConfig) -> SftConfig | None:
    """The supervised run that comes before GRPO; None where there is none. Raises ConfigError."""
    stage = config.sft
    if stage is None:
        return None
    if config.distributed:
        raise ConfigError(
            "sft: happens in this flow's own process, and distributed is true, which trains elsewhere: set "
            "distributed=false, or fine-tune first (forge sft) and leave sft out"
        )
    run = load_sft_config(stage.config, stage.overrides)
    if stage.data is None:
        return run
    section = run.dataset.model_dump() if run.dataset else {}
    return load_sft_config(run, {"dataset": {**section, "path": stage.data, "mixture": []}})


def _place(data: str, folder: Path) -> str:
    """``data`` in full where it names files, seen from the working directory or else from ``folder``."""
    roots = [] if "://" in data else [Path.cwd(), folder.absolute()]
    found = (os.path.abspath(root / data) for root in roots if glob(str(root / data), recursive=True))
    return next(found, data)


def _with_data(run: RunConfig, data: str | None) -> RunConfig:
    if data is None:
        return run
    section = run.dataset.model_dump() if run.dataset else {}
    return load_config(run, {"dataset": {**section, "path": data}})


def _tree(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if not path.is_file():
        raise ConfigError([f"the file does not exist: give the path of a YAML file (now in {Path.cwd()})"], str(path))
    try:
        tree, problems = load_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError([f"is no valid YAML: {yaml_mistake(error)}"], str(path)) from None
    if problems or not isinstance(tree, dict):
        raise ConfigError(problems or ["is not a mapping: write keys and values, such as 'name: support'"], str(path))
    return tree


def _split(overrides: Overrides) -> tuple[dict[str, Any], Overrides]:
    """The overrides of the retraining, with typed values, and those of the run, as they are."""
    mine = lambda key: key.lstrip("~").partition(".")[0] in RetrainConfig.model_fields
    if isinstance(overrides, Mapping):
        own = {key: value for key, value in overrides.items() if mine(key)}
        return own, {key: value for key, value in overrides.items() if not mine(key)}
    words = [word for word in overrides if mine(word.partition("=")[0])]
    own = {key: load_yaml(value)[0] for key, _, value in (word.partition("=") for word in words)}
    return own, [word for word in overrides if word not in words]


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    section, _, leaf = key.partition(".")
    if leaf:
        tree[section] = {**(tree.get(section) or {}), leaf: value}
    else:
        tree[section] = value


def _problem(detail: Any) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        sections: dict[str, type[Section]] = {"gate": GateSection, "sft": SftStage}
        section = sections.get(path.partition(".")[0], RetrainConfig)
        return f"{path}: unknown key: the keys here are {', '.join(section.model_fields)}"
    return (
        f"{path}: {detail['msg']} (it is {detail['input']!r})" if detail["type"] != "missing" else f"{path}: is missing"
    )

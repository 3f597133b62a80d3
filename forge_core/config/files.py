"""Files that a configuration names.

Guarantee: a relative path that names something on this disk, seen from the working directory or else from the folder
of the configuration file, is written in full; so it means the same from any folder of its machine. Everything else
(hub ids, built-in rewards, modules, paths that name nothing) stays as it is written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from forge_core.config.run_config import RunConfig

PYTHON = "python://"


def located(config: RunConfig, folder: Path | None = None) -> RunConfig:
    """``config`` with the files of model, data sets, rewards and loss in full; ``folder`` is that of its file."""
    tree = config.model_dump(mode="json")
    roots = [Path.cwd(), *([folder.absolute()] if folder else [])]
    datasets = [tree["dataset"], (tree["warm_start"] or {}).get("dataset")]
    tree["model"] = located_path(tree["model"], roots)
    for dataset in filter(None, datasets):
        dataset["path"] = located_path(dataset["path"], roots)
    if "teacher" in tree["loss"]:
        tree["loss"]["teacher"] = located_path(tree["loss"]["teacher"], roots)
    if "path" in tree["loss"]:
        tree["loss"]["path"] = _located_object(tree["loss"]["path"], roots)
    for function in [f for one in tree["rewards"]["functions"] for f in (one, *one.get("verifiers", ()))]:
        if function["name"] == "reward_model":
            function["model"] = located_path(function["model"], roots)
        if "path" in function:
            function["path"] = _located_object(function["path"], roots)
    located_backend(tree, roots)
    return RunConfig.model_validate(tree)


def located_backend(tree: dict[str, Any], roots: list[Path]) -> None:
    """Write the file of a metric backend of the user's in full."""
    if (custom := tree["metric_logging"]["custom"]) is not None:
        custom["path"] = _located_object(custom["path"], roots)


def located_path(value: Any, roots: list[Path]) -> Any:
    """A path, hub id or ``python://`` function; files that are there, seen from one of ``roots``, in full."""
    if not isinstance(value, str):
        return value
    if value.startswith(PYTHON):
        return PYTHON + _located_object(value.removeprefix(PYTHON), roots)
    return value if "://" in value else _in_full(value, roots)


def _located_object(path: str, roots: list[Path]) -> str:
    """``file.py:name`` with the file in full; a built-in name or ``module:name`` as it is."""
    file, colon, name = path.rpartition(":")
    return f"{_in_full(file, roots)}{colon}{name}" if file.endswith(".py") else path


def _in_full(path: str, roots: list[Path]) -> str:
    found = [root / path for root in roots if path and (root / path).exists()]
    return os.path.abspath(found[0]) if found else path

"""The code that a configuration names: rewards, a loss, functions that make prompts.

Invariants:
- Looking at code (where it lies, its digest) imports none of it.
- A store names code and never supplies it: what a stored configuration names is used only where this machine offers it
  (``forge_core.data.importing.check_place``), and with the digest that the run recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from forge_core.config import ConfigError
from forge_core.config.any_config import AnyConfig
from forge_core.config.data_sections import DatasetSection
from forge_core.config.files import PYTHON
from forge_core.config.rollout_sections import EnvironmentSection
from forge_core.config.sft_config import SftConfig
from forge_core.data.importing import FORGE, OWN_PACKAGES, ObjectPathError, check_place, source_file
from forge_core.data.sft_settings import SftSource
from forge_core.environments.resolve import full_path as environment_path
from forge_core.rewards.resolve import full_path


def code_digests(config: AnyConfig, flow: str = "grpo") -> dict[str, str]:
    """Digests of the code that decides a run's numbers: Forge's own, and the source files that ``named_code`` names."""
    own = hashlib.sha256()
    for file in sorted(f for package in OWN_PACKAGES for f in (FORGE / package).rglob("*.py")):
        own.update(file.relative_to(FORGE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return {f"forge-rl {forge_version()}": own.hexdigest(), **_named_digests(config, flow)}


def named_code(config: AnyConfig, flow: str = "grpo") -> dict[str, tuple[str, str]]:
    """The code that a configuration names: what it is for -> the key that names it, and the path. ``flow``: of a kind
    of run that uses only a part of it."""
    if isinstance(config, SftConfig):
        return _functions({"dataset": config.dataset, "validation.dataset": config.validation.dataset})
    rewards = {f"reward {path}": ("rewards.functions", full_path(path)) for path in config.rewards.paths}
    loss = {f"loss {config.loss.path}": ("loss.path", config.loss.path)} if config.loss.name == "custom" else {}
    warm_start = config.warm_start.dataset if config.warm_start else None
    data = _functions({"dataset": config.dataset, "warm_start.dataset": warm_start})
    played = _environment(config.environment)
    return {"rescore": rewards, "retrain-from": loss}.get(flow, {**rewards, **loss, **data, **played})


def own_code(config: AnyConfig, flow: str = "grpo") -> list[str]:
    """What the configuration names of code that is not Forge's."""
    named = named_code(config, flow).items()
    return [name for name, (_, path) in named if path.partition(":")[0].partition(".")[0] not in OWN_PACKAGES]


def _environment(section: EnvironmentSection | None) -> dict[str, tuple[str, str]]:
    if section is None:
        return {}
    return {f"environment {section.path}": ("environment.path", environment_path(section.path))}


def _functions(sections: Mapping[str, DatasetSection | SftSource | None]) -> dict[str, tuple[str, str]]:
    """The functions that make data: by key, the sections that may name one."""
    found: dict[str, tuple[str, str]] = {}
    for key, section in sections.items():
        if isinstance(section, SftSource):
            found |= _functions({f"{key}.mixture.{i}": part for i, part in enumerate(section.mixture)})
        if section is not None and (section.path or "").startswith(PYTHON):
            found[f"dataset {section.path}"] = (f"{key}.path", (section.path or "").removeprefix(PYTHON))
    return found


def _named_digests(config: AnyConfig, flow: str) -> dict[str, str]:
    found = {}
    for name, (key, path) in named_code(config, flow).items():
        try:
            found[name] = _sha256(source_file(path))
        except ObjectPathError as error:
            raise ConfigError(f"{key}: {error}") from error
    return found


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def check_named_code(
    run_id: str, stored: AnyConfig, used: AnyConfig, flow: str, recorded: Mapping[str, str] | None
) -> None:
    """Raise ConfigError unless all code that ``stored`` names and ``used`` still does lies where this machine offers
    code, with the ``recorded`` digests (None: with any)."""
    problems, names = [], named_code(stored, flow)
    for name in sorted(names.keys() & named_code(used, flow).keys()):
        key, path = names[name]
        try:
            file = check_place(path)
        except ObjectPathError as error:
            problems.append(f"{key}: {error}")
            continue
        if recorded is not None and _sha256(file) != recorded.get(name):
            problems.append(
                f"{key}: {file} is not the file that run {run_id!r} recorded as {name}: restore it, or accept the "
                "change with --allow-code-change (forge eval: give a configuration with --config)"
            )
    if problems:
        raise ConfigError(problems, f"the code of run {run_id!r} cannot be used")


def forge_version() -> str:
    """The installed version; a bare checkout (on ``PYTHONPATH``) has none."""
    try:
        return version("forge-rl")
    except PackageNotFoundError:
        return "from source"

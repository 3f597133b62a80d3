"""The code that a configuration names: rewards, a loss, functions that make prompts, a metric backend and the like.

Invariants:
- Looking at code (where it lies, its digest) imports none of it.
- A store names code and never supplies it: what a stored configuration names is used only where this machine offers it
  (``forge_core.data.importing.check_place``), and with the digest that the run recorded.
- Digests cover the code that decides a run's numbers, and a metric backend, which decides none but runs as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from forge_core.config import ConfigError, RunConfig
from forge_core.config.any_config import AnyConfig
from forge_core.config.data_sections import DatasetSection
from forge_core.config.files import PYTHON
from forge_core.config.rollout_sections import EnvironmentSection
from forge_core.config.sft_config import SftConfig
from forge_core.config.vllm_keys import named_classes, opaque
from forge_core.data.importing import FORGE, OWN_PACKAGES, ObjectPathError, check_place, source_file
from forge_core.data.sft_settings import SftSource
from forge_core.environments.resolve import full_path as environment_path
from forge_core.rewards.resolve import full_path

BACKEND = "metric backend "
VERIFIERS = "forge_core.environments.verifiers:"  # whose option ``environment`` names a module


def code_digests(config: AnyConfig, flow: str = "grpo") -> dict[str, str]:
    """Digests of Forge's own code, and of the source files that ``named_code`` names."""
    own = hashlib.sha256()
    for file in sorted(f for package in OWN_PACKAGES for f in (FORGE / package).rglob("*.py")):
        own.update(file.relative_to(FORGE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return {f"forge-rl {forge_version()}": own.hexdigest(), **_named_digests(config, flow)}


def named_code(config: AnyConfig, flow: str = "grpo") -> dict[str, tuple[str, str]]:
    """The code that a configuration names: what it is for -> the key that names it, and the path. ``flow``: of a kind
    of run that uses only a part of it; ``evaluate``: that an evaluation uses; ``show``: that only shows."""
    shown = _backend(config)
    if isinstance(config, SftConfig):
        return _functions({"dataset": config.dataset, "validation.dataset": config.validation.dataset}) | shown
    rewards = {f"reward {path}": ("rewards.functions", full_path(path)) for path in config.rewards.paths}
    loss = {f"loss {config.loss.path}": ("loss.path", config.loss.path)} if config.loss.name == "custom" else {}
    warm_start = config.warm_start.dataset if config.warm_start else None
    data = _functions({"dataset": config.dataset, "warm_start.dataset": warm_start})
    sampling = _environment(config.environment) | _engine(config)
    all_of_it = {**rewards, **loss, **data, **sampling}
    parts = {"rescore": rewards | shown, "retrain-from": loss | shown, "evaluate": all_of_it, "show": shown}
    return parts.get(flow, all_of_it | shown)


def code_changes(recorded: Mapping[str, str], today: Mapping[str, str]) -> list[str]:
    """What is not the code any more that was recorded. Another metric backend is a choice, not a change."""
    changed = {name for name in recorded.keys() | today.keys() if recorded.get(name) != today.get(name)}
    return sorted(n for n in changed if not n.startswith(BACKEND) or (n in recorded and n in today))


def own_code(config: AnyConfig, flow: str = "grpo") -> list[str]:
    """What the configuration names of code that is not Forge's."""
    named = named_code(config, flow).items()
    return [name for name, (_, path) in named if path.partition(":")[0].partition(".")[0] not in OWN_PACKAGES]


def _environment(section: EnvironmentSection | None) -> dict[str, tuple[str, str]]:
    if section is None:
        return {}
    path = environment_path(section.path)
    itself = {f"environment {section.path}": ("environment.path", path)}
    return itself | _verifiers("environment", path, section.options)


def _verifiers(key: str, path: str, options: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The package of an environment of verifiers, which is imported by its id: ``owner/my-env`` is ``my_env``."""
    name = options.get("environment")
    if not path.startswith(VERIFIERS) or not isinstance(name, str):
        return {}
    module = name.rpartition("/")[2].replace("-", "_")
    return {f"environment {name}": (f"{key}.options.environment", f"{module}:load_environment")}


def _engine(config: RunConfig) -> dict[str, tuple[str, str]]:
    """The classes of one's own in vLLM's settings."""
    paths = named_classes(config.generator)
    return {f"engine setting {path}": ("generator.engine_args", path) for path in paths}


def _backend(config: AnyConfig) -> dict[str, tuple[str, str]]:
    section = config.metric_logging.custom
    return {f"{BACKEND}{section.path}": ("metric_logging.custom.path", section.path)} if section else {}


def _functions(sections: Mapping[str, DatasetSection | SftSource | None]) -> dict[str, tuple[str, str]]:
    """The functions that make data: by key, the sections that may name one."""
    found: dict[str, tuple[str, str]] = {}
    for key, section in sections.items():
        if isinstance(section, SftSource):
            found |= _functions({f"{key}.mixture.{i}": part for i, part in enumerate(section.mixture)})
        if section is not None and (section.path or "").startswith(PYTHON):
            path = (section.path or "").removeprefix(PYTHON)
            found[f"dataset {section.path}"] = (f"{key}.path", path)
            found |= _verifiers(key, path, section.options)
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
    problems, names = _opaque(stored), named_code(stored, flow)
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


def _opaque(config: AnyConfig) -> list[str]:
    return [] if isinstance(config, SftConfig) else opaque(config.generator)


def forge_version() -> str:
    """The installed version; a bare checkout (on ``PYTHONPATH``) has none."""
    try:
        return version("forge-rl")
    except PackageNotFoundError:
        return "from source"

"""From a YAML file and overrides to a ``RunConfig``, and back.

Guarantees:
- ``load_config`` returns a valid configuration or raises one ``ConfigError`` with every problem it found.
- Order: file, then overrides, then validation. Defaults come from the models; nothing is read from anywhere else
  but the environment variables that a value names.
- ``load_config`` of ``to_yaml(config)`` gives an equal configuration; equal configurations have equal digests.
- ``hf://`` names are kept as they are: the model resolver turns them into local folders.
- Files are written in full (``files.py``): found from the working directory, else from the configuration's folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import ValidationError

from forge_core.config.errors import ConfigError
from forge_core.config.explain import problems_of
from forge_core.config.files import located
from forge_core.config.keys import keys_of
from forge_core.config.other_kinds import other_kind
from forge_core.config.overrides import Overrides, apply_overrides
from forge_core.config.references import escape, resolve_references, secret_problems
from forge_core.config.run_config import RunConfig
from forge_core.config.section import Section
from forge_core.config.yaml_text import dump_yaml, load_yaml, yaml_mistake

if TYPE_CHECKING:
    from forge_core.config.any_config import AnyConfig

S = TypeVar("S", bound=Section)
DEFAULT_STORE = "./forge-store"


def load_config(source: str | Path | Mapping[str, Any] | RunConfig, overrides: Overrides = ()) -> RunConfig:
    """The configuration of a YAML file (or of a mapping, or of a configuration), with overrides applied.

    Raises ``ConfigError`` with every problem found, each as ``key: what is wrong: what would be right``.
    """
    try:
        config = validated(RunConfig, source, overrides)
    except ConfigError as error:
        raise ConfigError([*_other_kind(source), *error.problems], error.source) from None
    return located(config, folder_of(source))


def validated(model: type[S], source: Any, overrides: Overrides) -> S:
    """A configuration of the kind ``model``, its files as they are written. Raises ConfigError as ``load_config``."""
    problems: list[str] = []
    name = str(source) if isinstance(source, str | Path) else "configuration"
    with keys_of(model):
        tree = _source_tree(source, problems)
        apply_overrides(tree, overrides, problems)
        problems += _empty_repositories(tree, "") + secret_problems(tree)
        try:
            config = model.model_validate(tree)
        except ValidationError as error:
            raise ConfigError([*problems, *problems_of(error)], name) from None
    if problems:
        raise ConfigError(problems, name)
    return config


def _other_kind(source: Any) -> list[str]:
    """What a file is a configuration of, where that is not a GRPO run."""
    if not isinstance(source, str | Path) or not Path(source).is_file():
        return []
    try:
        found = other_kind(_source_tree(source, []))
    except ConfigError:  # no YAML: said already
        return []
    return [found] if found else []


def folder_of(source: Any) -> Path | None:
    """The folder of the file that a configuration comes from."""
    return Path(source).parent if isinstance(source, str | Path) else None


def to_yaml(config: Section) -> str:
    """Every key with its value, defaults included, as YAML that ``load_config`` reads back."""
    return dump_yaml(escape(config.model_dump(mode="json")))


def config_digest(config: Section) -> str:
    """sha256 (hex) of the configuration as canonical JSON."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def diff(old: Section, new: Section) -> list[tuple[str, Any, Any]]:
    """The keys that differ as ``(key, old value, new value)``; null stands for a key that one side lacks."""
    return _diff(old.model_dump(mode="json"), new.model_dump(mode="json"), "")


def store_uri(flag: str | None = None, config: AnyConfig | None = None) -> str:
    """Where the store is: ``store=`` or ``--store``, then the config, then ``FORGE_STORE``, then ``./forge-store``."""
    configured = config.store if config is not None else None
    return flag or configured or os.environ.get("FORGE_STORE") or DEFAULT_STORE


def _source_tree(source: str | Path | Mapping[str, Any] | Section, problems: list[str]) -> dict[str, Any]:
    if isinstance(source, Section):
        return source.model_dump(mode="json")
    if isinstance(source, str | Path):
        source, found = _read(Path(source))
        problems += found
    return resolve_references(source, "", problems)


def _read(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError([f"the file {what}: give the path of a YAML file (now in {Path.cwd()})"], str(path))
    try:
        tree, problems = load_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError([f"is no valid YAML: {yaml_mistake(error)}"], str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"is not text in UTF-8 (byte {error.start}): save it as UTF-8"], str(path)) from None
    if not isinstance(tree, Mapping):
        what = "is empty" if tree is None else "is not a mapping"
        raise ConfigError([f"the file {what}: write keys and values, such as 'model: Qwen/Qwen3-0.6B'"], str(path))
    return tree, problems


def _empty_repositories(value: Any, key: str) -> list[str]:
    if isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [p for k, v in pairs for p in _empty_repositories(v, f"{key}.{k}" if key else str(k))]
    if isinstance(value, str) and value.startswith("hf://") and not value.removeprefix("hf://").strip("/ "):
        return [f"{key}: Empty repository name: write hf://org/name"]
    return []


def _diff(old: Any, new: Any, key: str) -> list[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = list(dict.fromkeys([*old, *new]))
        return [d for n in names for d in _diff(old.get(n), new.get(n), f"{key}.{n}" if key else str(n))]
    return [] if old == new and type(old) is type(new) else [(key, old, new)]

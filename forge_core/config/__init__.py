"""The configuration of a run: models, loading, and the gate before a run. Imports no engine."""

from forge_core.config.errors import ConfigError
from forge_core.config.keys import fields_reference
from forge_core.config.loader import config_digest, diff, load_config, store_uri, to_yaml
from forge_core.config.run_config import RunConfig
from forge_core.config.run_gate import config_warnings, training_problems, validate_for_training

__all__ = [
    "ConfigError",
    "RunConfig",
    "config_digest",
    "config_warnings",
    "diff",
    "fields_reference",
    "load_config",
    "store_uri",
    "to_yaml",
    "training_problems",
    "validate_for_training",
]

"""The configuration of a run of any kind, as a type."""

from __future__ import annotations

from typing import TypeAlias

from forge_core.config.run_config import RunConfig
from forge_core.config.sft_config import SftConfig

AnyConfig: TypeAlias = RunConfig | SftConfig

"""Types of the flows' parameters, as the run form of the Prefect UI shows them.

``config`` is a choice of the project's configurations (``configs/*.yaml`` of the folder that is deployed), a path of
another file, or all values. Configurations of retrainings are those named ``retrain*.yaml``, those of supervised runs
``sft*.yaml``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from forge_core.config import RunConfig
from forge_core.config.retrain_config import RetrainConfig
from forge_core.config.sft_config import SftConfig

KINDS = ("retrain", "sft")  # beginnings of names; the others are GRPO runs


class Choice:
    """Schema of a union of a configuration model and a path."""

    def __init__(self, kind: str | None = None) -> None:
        self._kind = kind

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        whole, path, *others = handler(core)["anyOf"]
        found = sorted(Path("configs").glob("*.yaml"))
        kinds = {f.as_posix(): next((k for k in KINDS if f.name.startswith(k)), None) for f in found}
        files = [file for file, kind in kinds.items() if kind == self._kind]
        choice = {"title": "Configuration of the project", "type": "string", "enum": files}
        path |= {"title": "Another file", "description": "path of a YAML file on the worker's machine"}
        return {"anyOf": [*([choice] if files else []), path, whole, *others]}


ConfigParameter = Annotated[RunConfig | str, Choice()]
RetrainParameter = Annotated[RetrainConfig | str, Choice("retrain")]
SftParameter = Annotated[SftConfig | str, Choice("sft")]

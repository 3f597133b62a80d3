"""Types of the flows' parameters, as the run form of the Prefect UI shows them.

``config`` is a choice of the project's configurations (``configs/*.yaml`` of the folder that is deployed), a path of
another file, or all values. Configurations of retrainings are those named ``retrain*.yaml``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from forge_core.config import RunConfig
from forge_core.config.retrain_config import RetrainConfig


class Choice:
    """Schema of a union of a configuration model and a path."""

    def __init__(self, of_retrainings: bool = False) -> None:
        self._of_retrainings = of_retrainings

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        whole, path, *others = handler(core)["anyOf"]
        found = sorted(Path("configs").glob("*.yaml"))
        files = [f.as_posix() for f in found if f.name.startswith("retrain") == self._of_retrainings]
        choice = {"title": "Configuration of the project", "type": "string", "enum": files}
        path |= {"title": "Another file", "description": "path of a YAML file on the worker's machine"}
        return {"anyOf": [*([choice] if files else []), path, whole, *others]}


ConfigParameter = Annotated[RunConfig | str, Choice()]
RetrainParameter = Annotated[RetrainConfig | str, Choice(of_retrainings=True)]

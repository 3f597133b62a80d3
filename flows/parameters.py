"""Types of the flows' parameters, as the run form of the Prefect UI shows them.

``config`` is a choice of the project's configurations (``configs/*.yaml`` of the folder that is deployed), a path of
another file, or all values; ``overrides`` are dotted keys to values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from forge_core.config import RunConfig


class _Choice:
    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        whole, path = handler(core)["anyOf"]
        files = sorted(file.as_posix() for file in Path("configs").glob("*.yaml"))
        choice = {"title": "Configuration of the project", "type": "string", "enum": files}
        path |= {"title": "Another file", "description": "path of a YAML file on the worker's machine"}
        return {"anyOf": [*([choice] if files else []), path, whole | {"title": "All values"}]}


ConfigParameter = Annotated[RunConfig | str, _Choice()]

"""What is to be deployed: ``prefect.yaml``, read and checked before a server is asked.

Invariants:
- The file is one that Prefect's own ``prefect deploy`` reads too; ``work_pools`` is the only part of our own.
- A deployment's parameters fit the flow's signature, its pool is listed, and each of its schedules has a slug: what
  is the same schedule can then be told, and one that an operator paused stays paused.
- Placeholders of the environment (``{{ $NAME }}``) are filled in here, ``FORGE_CHECKOUT`` with the file's folder;
  those of Prefect variables and blocks are left for the worker, so that no value of a secret is deployed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.templating import apply_values
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_core.config import ConfigError

CHECKOUT = "FORGE_CHECKOUT"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Pool(Part):
    """A work pool. ``concurrency_limit``: runs at a time, over all of its workers; None: as many as there are."""

    description: str
    concurrency_limit: int | None = Field(default=None, ge=1)


class Schedule(Part):
    """When a deployment runs by itself; ``slug`` names it for ever."""

    slug: str
    cron: str
    timezone: str = "UTC"
    active: bool = True
    parameters: dict[str, Any] = {}

    def as_prefect(self) -> CronSchedule:
        return CronSchedule(cron=self.cron, timezone=self.timezone)


class Limit(Part):
    """Runs of one deployment at a time; ``ENQUEUE``: further ones wait, ``CANCEL_NEW``: they are cancelled."""

    limit: int = Field(ge=1)
    collision_strategy: str = "ENQUEUE"


class Work(Part):
    name: str
    job_variables: dict[str, Any] = {}


class Deployment(Part):
    """One deployment of the file; ``schema`` of its parameters and ``flow`` are read from its entry point."""

    name: str
    entrypoint: str
    description: str
    tags: list[str] = []
    parameters: dict[str, Any] = {}
    work_pool: Work
    concurrency_limit: Limit | None = None
    schedules: list[Schedule] = []
    flow: str = ""
    parameter_schema: dict[str, Any] = {}

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.name}"


class Project(Part):
    """The whole file. ``pull`` says how a worker gets at the code."""

    name: str
    definitions: Any = None  # YAML anchors
    work_pools: dict[str, Pool]
    pull: list[dict[str, Any]]
    deployments: list[Deployment]


def load_project(file: Path) -> Project:
    """Read ``file`` and import its flows. Raises ConfigError naming the file, the deployment and what is wrong."""
    if not file.is_file():
        raise ConfigError(
            f"there is no {file.absolute()}: go to the folder of your deployments (Forge's own are in its checkout), "
            "or name the file with --file"
        )
    folder = file.absolute().parent
    with _environment(folder):
        project = _parsed(file, folder)
        for deployment in project.deployments:
            _read_flow(file, deployment)
    _check(file, project)
    return project


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """Entry points, and the configurations to choose from, are relative to the file's folder."""
    before = os.environ.get(CHECKOUT)
    os.environ[CHECKOUT] = str(folder)
    try:
        with chdir(folder):
            yield
    finally:
        os.environ.pop(CHECKOUT) if before is None else os.environ.update({CHECKOUT: before})


def _parsed(file: Path, folder: Path) -> Project:
    try:
        tree = yaml.safe_load((folder / file.name).read_text(encoding="utf-8"))
        return Project.model_validate(apply_values(tree, {}, remove_notset=False))
    except yaml.YAMLError as error:
        raise ConfigError([f"is no valid YAML: {error}"], str(file)) from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(problems, str(file)) from None


def _read_flow(file: Path, deployment: Deployment) -> None:
    try:
        flow: Flow[Any, Any] = load_flow_from_entrypoint(deployment.entrypoint)
    except Exception as error:  # the module of a flow may raise anything
        where = f"{file}: deployment {deployment.name}: entrypoint {deployment.entrypoint}"
        raise ConfigError([f"no flow could be loaded: {error}"], where) from error
    deployment.flow = flow.name
    deployment.parameter_schema = parameter_schema(flow).model_dump(exclude_unset=True)


def _check(file: Path, project: Project) -> None:
    problems = []
    for d in project.deployments:
        unknown = sorted(d.parameters.keys() - d.parameter_schema["properties"].keys())
        if unknown:
            problems.append(f"{d.full_name}: the flow has no parameter {', '.join(unknown)}")
        if d.work_pool.name not in project.work_pools:
            problems.append(f"{d.full_name}: the work pool {d.work_pool.name} is not one of work_pools")
        for schedule in d.schedules:
            try:
                schedule.as_prefect()
            except ValidationError as error:
                problems.append(f"{d.full_name}: schedule {schedule.slug}: {error.errors()[0]['msg']}")
    names = [d.full_name for d in project.deployments]
    problems += [f"{name}: stands there twice" for name in sorted({n for n in names if names.count(n) > 1})]
    if problems:
        raise ConfigError(problems, str(file))

"""Put a project on a Prefect server: work pools, the store's address, deployments, automations.

Invariants:
- What is there already and is as the project says is not touched: a second deployment changes nothing.
- What an operator sets by hand is left as it is, and reported: limits, paused schedules, disabled automations, the
  address of the store, schedules that were added. ``reset`` sets the limits and schedules of the project again.
- Nothing is ever deleted.
- The store's address is a Prefect block (``store_block.py``) that workers read when a run starts.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from flows.deploying_automations import ALARMS, automations
from flows.deploying_project import Deployment, Pool, Project, Schedule
from flows.store_block import NAME, ForgeStore, credentials_in
from forge_core.config import ConfigError


class Report:
    """What happened to each thing, in order: ``created``, ``changed`` or ``left``, and its name."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def add(self, what: str, name: str, why: str = "") -> None:
        self.lines.append((what, f"{name} ({why})" if why else name))


class Comparison:
    """A thing that was there already: what of it was changed, and what an operator set and keeps."""

    def __init__(self, reset: bool) -> None:
        self._reset = reset
        self._changed: list[str] = []
        self._kept: list[str] = []

    def changed(self, *what: str) -> None:
        self._changed += what

    def operators(self, what: str) -> bool:
        """Note a difference that an operator made; whether it is to be undone."""
        if self._reset:
            self._changed.append(what)
        else:
            self._kept.append(f"{what}: --reset sets it back")
        return self._reset

    def to(self, report: Report, name: str) -> None:
        report.add("changed" if self._changed else "left", name, "; ".join(self._changed + self._kept))


def check_store(uri: str) -> None:
    """Raise ConfigError for an address with credentials in it."""
    if problem := credentials_in(uri):
        raise ConfigError(f"--store: {problem}")


def deploy(client: SyncPrefectClient, project: Project, store: str, *, move_store: bool, reset: bool) -> Report:
    """Everything of ``project``. ``store`` is used where none is set, and with ``move_store`` in any case."""
    report = Report()
    for name, pool in project.work_pools.items():
        _pool(client, report, name, pool, reset)
    _store(client, report, store, move_store)
    ids = {d.full_name: _deployment(client, report, d, project.pull, reset) for d in project.deployments}
    for automation in automations(ids, _notifier(client)):
        _automation(client, report, automation, reset)
    return report


def _pool(client: SyncPrefectClient, report: Report, name: str, pool: Pool, reset: bool) -> None:
    try:
        there = client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        wanted = WorkPoolCreate(name=name, type="process", base_job_template=template, **pool.model_dump())
        client.create_work_pool(wanted)
        return report.add("created", f"work pool {name}")
    compared = Comparison(reset)
    if there.description != pool.description:
        client.update_work_pool(name, WorkPoolUpdate(description=pool.description))
        compared.changed("description")
    limits = (there.concurrency_limit, pool.concurrency_limit)
    if limits[0] != limits[1] and compared.operators(_limits(*limits)):
        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=pool.concurrency_limit))
    compared.to(report, f"work pool {name}")


def _limits(there: int | None, wanted: int | None) -> str:
    return f"limit {there or 'none'}, not {wanted or 'none'}"


def _store(client: SyncPrefectClient, report: Report, store: str, move: bool) -> None:
    kind = ForgeStore.get_block_type_slug()
    name = f"block {kind}/{NAME}"
    try:
        there = str(client.read_block_document_by_name(NAME, kind).data["uri"])
    except ObjectNotFound:
        ForgeStore(uri=store).save(NAME)
        return report.add("created", name, store)
    if not move or there == store:
        return report.add("left", name, there)
    ForgeStore(uri=store).save(NAME, overwrite=True)
    report.add("changed", name, f"{store}, was {there}")


def _deployment(
    client: SyncPrefectClient, report: Report, d: Deployment, pull: list[dict[str, Any]], reset: bool
) -> UUID:
    fields = _fields(d, pull)
    limit = d.concurrency_limit.limit if d.concurrency_limit else None
    try:
        there = client.read_deployment_by_name(d.full_name)
    except ObjectNotFound:
        report.add("created", f"deployment {d.full_name}")
        schedules = [_new_schedule(s) for s in d.schedules]
        flow = client.create_flow_from_name(d.flow)
        return client.create_deployment(flow, d.name, schedules=schedules, concurrency_limit=limit, **fields)
    compared = Comparison(reset)
    update = {name: value for name, value in fields.items() if _field(there, name) != value}
    compared.changed(*update)
    present = there.global_concurrency_limit.limit if there.global_concurrency_limit else None
    if present != limit and compared.operators(_limits(present, limit)):
        update["concurrency_limit"] = limit
    if update:
        client.update_deployment(there.id, DeploymentUpdate(**update))
    _schedules(client, there, d.schedules, compared)
    compared.to(report, f"deployment {d.full_name}")
    return there.id


def _fields(d: Deployment, pull: list[dict[str, Any]]) -> dict[str, Any]:
    """What the project alone decides, under the names of the API."""
    limit = d.concurrency_limit
    return {
        "description": d.description,
        "tags": d.tags,
        "parameters": d.parameters,
        "parameter_openapi_schema": d.parameter_schema,
        "enforce_parameter_schema": True,
        "entrypoint": d.entrypoint,
        "pull_steps": pull,
        "work_pool_name": d.work_pool.name,
        "job_variables": d.work_pool.job_variables,
        "concurrency_options": limit and {"collision_strategy": limit.collision_strategy},
    }


def _field(there: DeploymentResponse, name: str) -> Any:
    value = getattr(there, name)
    return {"collision_strategy": value.collision_strategy} if name == "concurrency_options" and value else value


def _new_schedule(s: Schedule) -> DeploymentScheduleCreate:
    return DeploymentScheduleCreate(schedule=s.as_prefect(), active=s.active, parameters=s.parameters, slug=s.slug)


def _schedules(
    client: SyncPrefectClient, there: DeploymentResponse, wanted: list[Schedule], compared: Comparison
) -> None:
    """Bring the schedules that have a slug of the project up to date; the others are somebody's own."""
    present: dict[str | None, DeploymentSchedule] = {s.slug: s for s in there.schedules}
    for s in wanted:
        old = present.get(s.slug)
        if old is None:
            client.create_deployment_schedules(there.id, [_new_schedule(s)])
            compared.changed(f"schedule {s.slug} is new")
            continue
        if (old.schedule, old.parameters) != (s.as_prefect(), s.parameters):
            client.update_deployment_schedule(there.id, old.id, schedule=s.as_prefect(), parameters=s.parameters)
            compared.changed(f"schedule {s.slug}")
        if old.active != s.active and compared.operators(
            f"schedule {s.slug} is {'active' if old.active else 'paused'}"
        ):
            client.update_deployment_schedule(there.id, old.id, active=s.active)


def _notifier(client: SyncPrefectClient) -> UUID | None:
    """The notification block that alarms are sent with, where the operator has made one."""
    blocks = client.read_block_documents(block_schema_type="notify", include_secrets=False)
    return next((block.id for block in blocks if block.name == ALARMS), None)


def _automation(client: SyncPrefectClient, report: Report, wanted: AutomationCore, reset: bool) -> None:
    name = f"automation {wanted.name}"
    present = client.read_automations_by_name(wanted.name)
    if not present:
        client.create_automation(wanted)
        return report.add("created", name)
    there, compared = present[0], Comparison(reset)
    different = [f for f in ("description", "trigger", "actions") if getattr(there, f) != getattr(wanted, f)]
    compared.changed(*different)
    enabled = there.enabled or compared.operators("disabled")
    if different or enabled != there.enabled:
        client.update_automation(there.id, wanted.model_copy(update={"enabled": enabled}))
    compared.to(report, name)

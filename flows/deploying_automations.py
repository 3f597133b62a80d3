"""What the server does by itself: crashed runs are found and started again, new data is trained on.

Invariants:
- A run of ours that was alive and is silent for ``SILENCE`` has crashed: nobody is left who could say so when worker
  and flow were both killed. Runs without the tag ``forge`` are left alone; ours send a heartbeat every 30 s.
- A run with the tag ``restart-after-crash`` that has crashed, or whose machine was taken (``Preempted``), and that
  nobody has done anything about for ``PAUSE``, is scheduled again: the same flow run, so the same parameters. The flow
  goes on with its stored run, and fails instead of crashing when that leads nowhere, which ends the circle. The pause
  is there because a worker reports a crash twice, and its second report would undo the restart; it also keeps code that
  cannot even be imported from spinning.
- Alarms are sent on where the server has a notification block for them; each once, and none stops a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from uuid import UUID

from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState, RunDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from flows.flow_runs import PREEMPTED, REFUSED, SUPERSEDED

SILENCE = timedelta(seconds=90)
PAUSE = timedelta(seconds=15)
HEARTBEAT = "prefect.flow-run.heartbeat"
CRASHED = ("Crashed", PREEMPTED)
ENDED = ("Completed", "Failed", "Cancelled", *CRASHED, SUPERSEDED, REFUSED)
RETRAIN = "retrain/nightly"
RETRAIN_EVENTS = ("forge.data.new", "forge.eval.regressed")
ALARMS = "forge-alarms"  # the block that alarms are sent with


def automations(deployments: Mapping[str, UUID], notifier: UUID | None) -> list[AutomationCore]:
    """All of them; ``deployments``: ids by full name, ``notifier``: id of the block ``ALARMS``, if there is one."""
    found = [_silent_runs(), _crashed_runs()]
    if RETRAIN in deployments:
        found.append(_retraining(deployments[RETRAIN]))
    if notifier is not None:
        found.append(_alarms(notifier))
    return found


def _silent_runs() -> AutomationCore:
    return _automation(
        "forge: silent runs have crashed",
        "A run without a heartbeat for 90 seconds is marked Crashed.",
        EventTrigger(
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            match_related=_tag("forge"),
            for_each={"prefect.resource.id"},
            after={HEARTBEAT},
            expect={HEARTBEAT, *(f"prefect.flow-run.{state}" for state in ENDED)},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat: worker and flow are gone"),
    )


def _crashed_runs() -> AutomationCore:
    return _automation(
        "forge: crashed runs start again",
        "A crashed run with the tag restart-after-crash is scheduled again and goes on where it was.",
        EventTrigger(
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            match_related=_tag("restart-after-crash"),
            for_each={"prefect.resource.id"},
            after={f"prefect.flow-run.{state}" for state in CRASHED},
            expect={f"prefect.flow-run.{state}" for state in ("Scheduled", "AwaitingRetry", "Pending", "Running")},
            posture=Posture.Proactive,
            threshold=1,
            within=PAUSE,
        ),
        ChangeFlowRunState(state=StateType.SCHEDULED, message="started again after a crash", force=True),
    )


def _retraining(deployment: UUID) -> AutomationCore:
    return _automation(
        "forge: new data or a worse evaluation starts a retraining",
        f"Runs {RETRAIN} on the events {' and '.join(RETRAIN_EVENTS)}.",
        EventTrigger(expect=set(RETRAIN_EVENTS), posture=Posture.Reactive, threshold=1),
        RunDeployment(deployment_id=deployment),
    )


def _alarms(notifier: UUID) -> AutomationCore:
    return _automation(
        "forge: alarms are sent",
        f"Sends each alarm of a run with the notification block {ALARMS}.",
        EventTrigger(expect={"forge.alarm.*"}, posture=Posture.Reactive, threshold=1),
        SendNotification(
            block_document_id=notifier,
            subject="forge: {{ event.payload.name }} in {{ event.resource['prefect.resource.name'] }}",
            body="after step {{ event.payload.step }}: {{ event.payload.message }}",
        ),
    )


def _tag(name: str) -> dict[str, list[str]]:
    return {"prefect.resource.id": [f"prefect.tag.{name}"], "prefect.resource.role": ["tag"]}


def _automation(name: str, description: str, trigger: EventTrigger, action: ActionTypes) -> AutomationCore:
    return AutomationCore(name=name, description=description, enabled=True, trigger=trigger, actions=[action])

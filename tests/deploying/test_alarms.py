"""An alarm of a run becomes an event of the server, and a message of the operator's notification block."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.alarming import Alarming
from flows.deploying_automations import ALARMS
from forge_core.config import load_config
from forge_core.runs.context import RunContext
from forge_core.runs.record import create_run
from forge_core.store import Ledger, open_store
from tests.deploying.conftest import Operator
from tests.docs.documents import ROOT
from tests.docs.documents import blocks as documented
from tests.store.entries import RUN, entry, init_entry

pytestmark = pytest.mark.server


class Inbox(BaseHTTPRequestHandler):
    received: list[str]

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["content-length"])).decode())
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def inbox() -> Iterator[tuple[str, list[str]]]:
    """Where notifications go: address, and what has come."""
    received: list[str] = []
    server = HTTPServer(("127.0.0.1", 0), type("Mine", (Inbox,), {"received": received}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()


def context(committed: int = 0, **alarms: Any) -> RunContext:
    """Of a run with as many committed steps, each with a large KL."""
    store = open_store(f"memory://alarm-events-{committed}")
    given = {"run": {"id": RUN}, "steps": 9, "rewards": {"functions": [{"path": "exact_match"}]}, "alarms": alarms}
    ledger = Ledger(store, RUN)
    ledger.commit_init(init_entry())
    for batch in range(committed):
        assert ledger.commit(entry(batch, ledger.previous(batch), metrics={"kl": 2.0}))
    return RunContext(store, create_run(store, load_config(given)))


def stored_events(operator: Operator) -> dict[str, Any]:
    wanted = {"filter": {"event": {"prefix": ["forge.alarm."]}}}
    return {event["event"]: event for event in operator.api("/events/filter", wanted)["events"]}


@pytest.mark.usefixtures("deployed")
def test_alarms_are_events_and_are_sent_with_the_operators_block(operator: Operator, inbox: tuple[str, list[str]]):
    address, received = inbox
    block = {"name": "alarms", "url": address, "json_data": {"text": "{{subject}}: {{body}}"}}
    with temporary_settings({PREFECT_API_URL: operator.server.url}):
        CustomWebhookNotificationBlock(**block).save(ALARMS)
        said = operator.deploy("--store", operator.store.uri)
        assert said.pop("automation forge: alarms are sent") == "created"
        assert set(said.values()) == {"left"}
        ctx, notes = context(silent_minutes=0.02), list[str]()
        alarming = Alarming(ctx, notes.append)
        alarming.begin([])
        alarming.watch_silence()
        for batch in range(4):
            ctx.observers[-1](entry(batch, "", metrics={"kl": 2.0}))
        deadline = time.monotonic() + 30.0
        while len(notes) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        alarming.close()
        ctx.close()
        EventsWorker.instance().drain()
    assert notes[0] == (
        "alarm after step 3: the KL to the reference model is 2 nats per token, above 1 in 3 steps in a row"
    )
    assert "no new object for 0 minutes, limit 0.02 minutes" in notes[1]
    operator.wait("two notifications", lambda: len(received) == 2)
    assert sorted(received) == [
        f'{{"text":"forge: kl in {RUN}: after step 3: {notes[0].partition(": ")[2]}"}}',
        f'{{"text":"forge: silent in {RUN}: after step 0: {notes[1].partition(": ")[2]}"}}',
    ]
    operator.wait("two stored events", lambda: len(stored_events(operator)) == 2)
    events = stored_events(operator)
    assert events.keys() == {"forge.alarm.kl", "forge.alarm.silent"}
    assert events["forge.alarm.kl"]["resource"]["prefect.resource.id"] == f"forge.run.{RUN}"
    assert events["forge.alarm.kl"]["payload"] | {"value": 2.0, "limit": 1.0} == events["forge.alarm.kl"]["payload"]
    remove(operator, "automations", "forge: alarms are sent")
    remove(operator, "block_documents", ALARMS)


@pytest.mark.usefixtures("deployed")
def test_the_python_of_the_document_works(operator: Operator):
    blocks = [block.text for block in documented(ROOT / "docs" / "alarms.md") if block.language == "python"]
    with temporary_settings({PREFECT_API_URL: operator.server.url}):
        for text in blocks:
            exec(text.replace("clean-up/nightly", "retrain/nightly"), {})
    remove(operator, "block_documents", ALARMS)
    remove(operator, "automations", "clean up")


def remove(operator: Operator, kind: str, name: str) -> None:
    """What was made here: the tests of this folder share the server."""
    (found,) = [one for one in operator.api(f"/{kind}/filter", {}) if one["name"] == name]
    operator.api(f"/{kind}/{found['id']}", method="DELETE")


@pytest.mark.parametrize(("committed", "told"), [(2, 1), (3, 0), (8, 0)])
def test_a_process_that_goes_on_with_a_run_knows_what_was_told(operator: Operator, committed: int, told: int):
    ctx, notes = context(committed), list[str]()
    with temporary_settings({PREFECT_API_URL: operator.server.url}):
        alarming = Alarming(ctx, notes.append)
        alarming.begin()
        ctx.observers[-1](entry(committed, "", metrics={"kl": 2.0}))
        alarming.close()
        ctx.close()
    assert len(notes) == told

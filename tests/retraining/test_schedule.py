"""Nobody types anything: a schedule fires on a real server, an event starts a retraining, a worker does the work."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_core.store import Store, open_store
from forge_core.weights.registry import Registry
from tests.docs.documents import ROOT
from tests.fixtures_prefect import OperatedServer, forge_server
from tests.retraining.tiny import NAME, new_data, write_project
from tests.retraining.workers import workers_of

pytestmark = [pytest.mark.engine, pytest.mark.server]
BIN = Path(sys.executable).parent
DEPLOYMENT = "retrain/nightly"
LIMIT_S = 200.0


@dataclass
class Site:
    """A folder with a project that is deployed, and a worker that serves it."""

    folder: Path
    server: OperatedServer
    store: Store

    def type(self, *command: str) -> str:
        """Run a command of the environment in the folder; its output."""
        argv = [str(BIN / command[0]), *command[1:]]
        done = subprocess.run(argv, cwd=self.folder, env=self.server.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def api(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.server.url}/{path}", data, {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request, timeout=120).read())

    def finished(self, *, scheduled: bool) -> list[dict[str, Any]]:
        """Flow runs that have ended, of the schedule or of something else."""
        states = {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}}
        found = self.api("flow_runs/filter", {"flow_runs": {"state": states}})
        return [run for run in found if run["auto_scheduled"] == scheduled]

    def wait(self, what: str, done: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not (found := done()):
            assert time.monotonic() < deadline, (
                f"{what}:\n{(self.folder / 'worker-coordinator.log').read_text()[-5000:]}"
            )
            time.sleep(0.5)
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    write_project(folder)
    new_data(folder, "monday")
    (folder / "flows").symlink_to(ROOT / "flows")
    (folder / "prefect.yaml").write_text(yaml.safe_dump(project()))
    with forge_server(tmp_path_factory.mktemp("site-home")) as server:
        site = Site(folder, server, open_store(str(folder / "store")))
        site.type("forge", "deploy", "--store", site.store.uri)
        with workers_of(["coordinator"], folder, server.environment):
            yield site


def project() -> dict[str, Any]:
    """Forge's own deployment of retrainings, every minute instead of every night, of the project in this folder."""
    forge = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    (nightly,) = [d for d in forge["deployments"] if d["entrypoint"] == "flows/retrain.py:retrain"]
    schedule = {**nightly["schedules"][0], "cron": "* * * * *", "active": True}
    changed = {"parameters": {"config": "retrain.yaml", "overrides": {}}, "schedules": [schedule]}
    pools = {"coordinator": forge["work_pools"]["coordinator"]}
    return {"name": "site", "work_pools": pools, "pull": forge["pull"], "deployments": [{**nightly, **changed}]}


def test_the_schedule_fires_and_the_model_is_promoted(site: Site):
    first = site.wait("a scheduled run", lambda: site.finished(scheduled=True))[-1]
    assert first["state_type"] == "COMPLETED"
    assert first["state"]["message"].startswith("promoted version 6 of digits-")
    entry = Registry(site.store, NAME).head()
    assert entry is not None
    assert (entry["action"], entry["subject"]["data"]["rows"]) == ("promote", 120)


def test_an_event_about_new_data_starts_a_retraining_on_it(site: Site):
    before = Registry(site.store, NAME).head()
    (schedule,) = site.api(f"deployments/name/{DEPLOYMENT}")["schedules"]
    site.type("prefect", "deployment", "schedule", "pause", DEPLOYMENT, schedule["id"])
    new_data(site.folder, "tuesday")
    site.type("prefect", "event", "emit", "forge.data.new", "--resource-id", "forge.data.prompts")
    (run,) = site.wait("a run that the event started", lambda: site.finished(scheduled=False))
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["created_by"]["type"] == "AUTOMATION"
    entry = Registry(site.store, NAME).head()
    assert before is not None
    assert entry is not None
    assert entry["subject"]["data"]["rows"] == 240
    assert entry["subject"]["parent"]["run_id"] == before["subject"]["run_id"]
    assert entry["action"] in ("promote", "reject")
    assert run["state"]["message"].endswith(f"as {NAME}: {entry['reason']}")

"""What docs/operating.md promises, on a real server with real workers, in its order. A run that is killed together with
its worker is left lying early on: the server takes a minute and a half to notice, and test_survival.py looks for it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploying.browser import Page, browser
from tests.deploying.conftest import Operator
from tests.docs.documents import ROOT, blocks, commands

pytestmark = [pytest.mark.server, pytest.mark.engine]

DOCUMENT = ROOT / "docs" / "operating.md"
CURVES = frozenset(ROOT.glob("*-reward.png"))  # before any test: `make quickstart` leaves one


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go. IMAGES=docs/images makes those of the document anew."""
    return Path(os.environ.get("IMAGES") or tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


def test_the_document_has_the_commands_that_are_typed_here():
    documented = {command for block in blocks(DOCUMENT) for command in commands(block)}
    assert documented >= {
        "forge server",
        "forge deploy",
        "prefect worker start --pool trainer",
        "prefect deployment run grpo/quickstart --watch",
    }


def test_deploy_creates_pools_store_deployments_and_automations(operator: Operator, deployed: dict[str, str]):
    assert set(deployed.values()) == {"created"}
    assert f"block forge-store/default ({operator.store.uri})" in deployed
    names = {f"{d['name']}" for d in operator.api("/deployments/filter", {})}
    assert names == {"quickstart", "train", "role", "run", "nightly"}
    pools = {p["name"]: (p["type"], p["concurrency_limit"]) for p in operator.api("/work_pools/filter", {})}
    assert pools["trainer"] == ("process", 1)
    assert pools.keys() == {"trainer", "generator", "scorer", "reference", "coordinator"}
    (nightly,) = operator.api("/deployments/name/retrain/nightly")["schedules"]
    assert (nightly["slug"], nightly["active"]) == ("nightly", False)


def test_a_deployed_run_leaves_its_steps_in_the_store_that_was_deployed(operator: Operator, quickstart: str):
    run = operator.flow_run(quickstart)
    assert (run["state_type"], run["state"]["message"]) == ("COMPLETED", "3 training steps committed")
    assert operator.committed(run["name"]) == 3, "the flow run has the name of its run"
    assert run["work_pool_name"] == "trainer"
    assert "3 of 3" in operator.type(f"forge runs --store {operator.store.uri}")
    assert set(ROOT.glob("*-reward.png")) == CURVES, "nothing is written into the checkout"


def test_a_supervised_run_is_trained_by_the_same_workers(operator: Operator, quickstart: str):
    small = {"steps": 2, "training.sync_interval": 2, "training.batch_size": 8, "training.warmup_steps": 0}
    parameters = f"--param config=configs/sft_quickstart.yaml --param 'overrides={json.dumps(small)}'"
    said = operator.type(f"prefect deployment run sft/train {parameters}")
    flow_run = next(line.split()[-1] for line in said.splitlines() if "UUID" in line)
    operator.wait("a supervised run of two steps", lambda: operator.ended(flow_run))
    assert operator.history(flow_run)[-1] == "Completed"
    assert operator.committed(operator.flow_run(flow_run)["name"]) == 2


def test_the_history_is_in_postgresql_alone(operator: Operator, database: str, quickstart: str):
    command = ["psql", database.replace("+asyncpg", ""), "-tAc", "select id, state_name from flow_run"]
    assert f"{quickstart}|Completed" in subprocess.check_output(command, text=True, timeout=30).split()
    assert not list(operator.server.home.glob("*.db"))


def test_a_run_without_an_owner_is_running_until_the_server_misses_its_heartbeats(operator: Operator, killed: str):
    assert operator.flow_run(killed)["state_name"] == "Running"


def test_deploying_again_changes_nothing(operator: Operator, deployed: dict[str, str], killed: str):
    before = operator.api("/deployments/filter", {})
    again = operator.deploy()
    assert again == dict.fromkeys(deployed, "left")
    polled = ("updated", "last_polled", "status")
    after = operator.api("/deployments/filter", {})
    assert [{k: v for k, v in d.items() if k not in polled} for d in after] == [
        {k: v for k, v in d.items() if k not in polled} for d in before
    ]


@pytest.mark.parametrize("event", ["forge.data.new", "forge.eval.regressed"])
def test_an_event_starts_a_retraining(operator: Operator, deployed: dict[str, str], killed: str, event: str):
    operator.type(f"prefect event emit {event} --resource-id forge.data.prompts")
    wanted = {"deployments": {"name": {"any_": ["nightly"]}}}
    operator.wait("a flow run", lambda: operator.api("/flow_runs/filter", wanted))
    (run,) = operator.api("/flow_runs/filter", wanted)
    assert (run["work_pool_name"], run["state_name"]) == ("coordinator", "Scheduled"), "no worker takes it here"
    operator.api(f"/flow_runs/{run['id']}", method="DELETE")


def test_what_an_operator_set_stays_until_reset(operator: Operator, deployed: dict[str, str], killed: str):
    (nightly,) = operator.api("/deployments/name/retrain/nightly")["schedules"]
    assert nightly["id"] in operator.type("COLUMNS=200 prefect deployment schedule ls retrain/nightly")
    operator.type(f"prefect deployment schedule resume retrain/nightly {nightly['id']}")
    operator.api(f"/deployments/{nightly['deployment_id']}", {"concurrency_limit": 4}, "PATCH")
    operator.type("prefect work-pool set-concurrency-limit trainer 2")
    block = operator.api("/block_types/slug/forge-store/block_documents/name/default")
    operator.api(f"/block_documents/{block['id']}", {"data": {"uri": f"{operator.store.uri}/moved"}}, "PATCH")
    automation = next(a for a in operator.api("/automations/filter", {}) if "new data" in a["name"])
    operator.api(f"/automations/{automation['id']}", {"enabled": False}, "PATCH")

    def seen() -> tuple[object, ...]:
        there = operator.api("/deployments/name/retrain/nightly")
        pool = operator.api("/work_pools/trainer")
        enabled = operator.api(f"/automations/{automation['id']}")["enabled"]
        limit = there["global_concurrency_limit"]["limit"]
        return there["schedules"][0]["active"], limit, pool["concurrency_limit"], enabled

    left = operator.deploy()
    assert seen() == (True, 4, 2, False)
    assert set(left.values()) == {"left"}
    assert f"block forge-store/default ({operator.store.uri}/moved)" in left
    assert "work pool trainer (limit 2, not 1: --reset sets it back)" in left
    reset = operator.deploy("--reset", "--store", operator.store.uri)
    assert seen() == (False, 1, 1, True)
    assert sorted(name.split(" (")[0] for name, what in reset.items() if what == "changed") == [
        f"automation {automation['name']}",
        "block forge-store/default",
        "deployment retrain/nightly",
        "work pool trainer",
    ]


def test_parameters_are_checked_before_a_run_is_made(operator: Operator, deployed: dict[str, str]):
    said = operator.type("""prefect deployment run grpo/train --param 'config={"steps": "many"}'""", status=1)
    assert "many" in said
    assert "config" in operator.type("prefect deployment run grpo/train", status=1), "it has no default"


def test_the_form_of_a_run_offers_the_configurations(
    operator: Operator, deployed: dict[str, str], killed: str, page: Page, images: Path
):
    deployment = operator.api("/deployments/name/grpo/quickstart")
    page.open(f"{operator.server.ui_url}/deployments/deployment/{deployment['id']}/run")
    text = page.wait_for("Configuration of the project", "configs/quickstart.yaml", "configs/smollm2_gpu.yaml")
    assert "retrain" not in text, "configurations of another kind are not offered"
    assert "keys to change, dotted" in text
    page.screenshot(images / "run-form.png")


def test_the_page_of_a_run_shows_its_name_tasks_logs_and_artifacts(
    operator: Operator, quickstart: str, page: Page, images: Path
):
    name = operator.flow_run(quickstart)["name"]
    page.open(f"{operator.server.ui_url}/runs/flow-run/{quickstart}")
    page.wait_for(name, "Completed", "trainer", "Finished in state Completed('3 training steps committed')")
    page.screenshot(images / "run.png", settle_s=5.0)  # the timeline is drawn slowly
    artifacts = operator.api("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [quickstart]}}})
    kinds = {a["type"]: a["id"] for a in artifacts}
    assert kinds.keys() == {"progress", "table", "image"}
    page.open(f"{operator.server.ui_url}/artifacts/artifact/{kinds['table']}")
    page.wait_for(f"{name}-steps", "reward", "staleness", "grad norm")
    page.screenshot(images / "steps.png")

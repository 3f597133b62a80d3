"""Retraining as it runs every night, on a real server: what is promoted, what is rejected, what is not done twice."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest
from prefect.states import State

from flows.server import ServerHandle
from forge_core.models.stored import RunVersion
from forge_core.runs.record import load_run
from forge_core.store import Ledger, Store, open_store
from forge_core.weights.registry import Registry
from tests.retraining.tiny import NAME, RUIN, new_data, write_project

pytestmark = [pytest.mark.engine, pytest.mark.server]


@dataclass
class Nights:
    """What happened: a state and the registry's entries after each night."""

    store: Store
    server: ServerHandle
    states: dict[str, State[Any]]
    entries: dict[str, list[dict[str, Any]]]
    sampled: dict[str, set[str]]

    def last(self, night: str) -> dict[str, Any]:
        return self.entries[night][-1]


def evaluations(store: Store) -> set[str]:
    return {key for key in store.list("evaluations") if key.endswith("manifest.json")}


@pytest.fixture(scope="module")
def nights(prefect_server: ServerHandle, tmp_path_factory: pytest.TempPathFactory) -> Nights:
    """Four nights: a gain on new data, nothing new, new data and a ruinous setting, new data again."""
    from flows.retrain import retrain

    folder = tmp_path_factory.mktemp("nights")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        store = open_store(str(folder / "store"))
        found = Nights(store, prefect_server, {}, {}, {})
        file = write_project(folder, gate={"max_kl": 20.0, "max_length_growth": 10.0})

        def night(name: str, overrides: dict[str, Any]) -> None:
            settings = {"store": store.uri, **overrides}
            found.states[name] = retrain(str(file), settings, return_state=True)
            found.entries[name] = Registry(store, NAME).entries()
            found.sampled[name] = evaluations(store)

        new_data(folder, "monday")
        night("gain", {})
        night("nothing new", {})
        new_data(folder, "wednesday")
        night("ruin", RUIN)
        new_data(folder, "thursday")
        night("second gain", {"training.learning_rate": 5e-3})
    return found


def test_a_gain_is_promoted_with_a_report_of_every_check(nights: Nights):
    entry = nights.last("gain")
    assert nights.states["gain"].is_completed()
    assert (
        nights.states["gain"].message
        == f"promoted version 6 of {entry['subject']['run_id']} as {NAME}: {entry['reason']}"
    )
    assert [e["action"] for e in nights.entries["gain"]] == ["register", "promote"]
    assert entry["aliases"]["production"] == entry["subject"]
    decision = entry["decision"]
    assert {c["name"]: c["passed"] for c in decision["gate"]["checks"]} == {
        "gain": True, "length_growth": True, "kl": True,
    }  # fmt: skip
    assert decision["candidate"]["reward"]["mean"] > decision["baseline"]["reward"]["mean"]
    assert entry["subject"]["evaluation"]["mean"] == decision["candidate"]["reward"]["mean"]
    assert 0 < decision["gpu_seconds"] < 600


def test_nothing_new_ends_completed_saying_so_and_trains_nothing(nights: Nights):
    state = nights.states["nothing new"]
    assert state.is_completed()
    assert state.message is not None
    assert state.message.startswith("nothing new: the 120 rows of ")
    assert state.message.endswith("; --force trains on them again")
    assert nights.entries["nothing new"] == nights.entries["gain"]
    assert nights.sampled["nothing new"] == nights.sampled["gain"]


def test_a_regression_is_rejected_and_production_stays(nights: Nights):
    entry, before = nights.last("ruin"), nights.last("gain")
    assert nights.states["ruin"].is_completed()
    assert entry["action"] == "reject"
    assert entry["aliases"] == {"production": before["aliases"]["production"], "candidate": None}
    gain = entry["decision"]["gate"]["checks"][0]
    assert (gain["name"], gain["passed"]) == ("gain", False)
    assert gain["value"] < 0
    assert "not above 0" in entry["reason"]


def test_after_a_rejection_new_data_is_trained_on_from_production(nights: Nights):
    entry, production = nights.last("second gain"), nights.last("gain")["subject"]
    run = load_run(nights.store, entry["subject"]["run_id"])
    assert run.config.model == str(RunVersion(production["run_id"], 6))
    assert entry["subject"]["parent"] == {
        "run_id": production["run_id"], "version": 6, "weights_digest": production["weights_digest"],
    }  # fmt: skip
    init = Ledger(nights.store, run.run_id).init()
    assert init is not None
    assert tensors(nights.store, init["weights"]) == tensors(nights.store, production["weights"])


def tensors(store: Store, prefix: str) -> set[str]:
    files = store.open_published(prefix).manifest.files
    return {f.sha256 for f in files if f.name.endswith(".safetensors")}


def test_every_model_traces_back_to_its_data(nights: Nights):
    monday, thursday = nights.last("gain")["subject"]["data"], nights.last("second gain")["subject"]["data"]
    assert (monday["rows"], thursday["rows"]) == (120, 360)
    assert monday["path"] == thursday["path"]
    assert monday["rows_digest"] != thursday["rows_digest"]
    assert 0 < monday["trained_prompts"] <= 48  # six steps of eight groups


def test_what_the_run_evaluated_is_taken_over_and_sampled_by_nobody_again(nights: Nights):
    for name in ("gain", "ruin", "second gain"):
        for prefix in nights.last(name)["decision"]["evaluations"].values():
            taken = nights.store.open_published(prefix).manifest.provenance["taken_from"]
            assert taken.startswith(f"runs/{nights.last(name)['subject']['run_id']}/evaluations/")


def test_the_server_has_the_events_and_the_reports(nights: Nights):
    wanted = {
        (f"forge.model.{verb}", nights.last(n)["n"], nights.last(n)["subject"]["run_id"])
        for n, verb in (("gain", "promoted"), ("ruin", "rejected"), ("second gain", "promoted"))
    }
    assert missing_events(nights.server, wanted) == set()
    flow_runs = [str(state.state_details.flow_run_id) for state in nights.states.values()]
    ours = {"flow_run_id": {"any_": flow_runs}, "key": {"any_": [f"report-{NAME}"]}}
    reports = post(nights.server, "artifacts/filter", {"artifacts": ours})
    assert len(reports) == 3  # none of the night with nothing new; other tests' retrainings are on this server too
    assert any("**failed** | gain" in r["data"] for r in reports)


def missing_events(server: ServerHandle, wanted: set[tuple[str, int, str]]) -> set[tuple[str, int, str]]:
    """Those of ``wanted`` that the server has not been told of; it writes events with some delay."""
    query = {"filter": {"event": {"prefix": ["forge.model."]}}, "limit": 50}
    deadline = time.monotonic() + 30
    while True:
        found = post(server, "events/filter", query)["events"]
        missing = wanted - {(e["event"], e["payload"].get("entry"), e["payload"].get("run_id")) for e in found}
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.5)


def post(server: ServerHandle, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{server.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request, timeout=30).read())

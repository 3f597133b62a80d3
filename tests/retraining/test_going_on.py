"""A retraining that was killed goes on where it stopped; it is decided once, and never on a state that has passed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.server import ServerHandle
from forge_core.config import ConfigError
from forge_core.config.retrain_config import load_retrain_config
from forge_core.evaluation.evaluating import evaluate_policy
from forge_core.retraining.beginning import NothingToDo, Retraining, begin
from forge_core.retraining.judging import Contest, decide, enter
from forge_core.stop import StopToken
from forge_core.store import Ledger, Store, layout, open_store
from forge_core.weights.registry import Registry
from tests.cli.conftest import FORGE, run_forge
from tests.retraining.records import published
from tests.retraining.tiny import NAME, new_data, write_project

pytestmark = [pytest.mark.engine, pytest.mark.server]
STEPS = 40  # long enough to be killed in the middle


@pytest.fixture(scope="module")
def killed(prefect_server: ServerHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """``forge retrain``, killed after some training steps, and started again as it was."""
    folder = tmp_path_factory.mktemp("killed")
    write_project(folder)
    new_data(folder, "monday")
    argv = ("retrain", "retrain.yaml", "store=store", f"steps={STEPS}")
    server = {"PREFECT_API_URL": prefect_server.url}
    process = subprocess.Popen([str(FORGE), *argv], cwd=folder, env={**os.environ, **server})
    (folder / "store").mkdir()
    store = open_store(str(folder / "store"))
    run_id = kill_after_steps(process, store, 3)
    committed = Ledger(store, run_id).head()
    again = run_forge(folder, *argv, **server)
    return {"folder": folder, "store": store, "run_id": run_id, "committed": committed, "again": again}


def kill_after_steps(process: subprocess.Popen[bytes], store: Store, steps: int) -> str:
    """``kill -9`` once the run has committed so many steps; its id."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        runs = store.folders("runs")
        if runs and store.exists(layout.ledger(runs[0], steps - 1)):
            process.send_signal(signal.SIGKILL)
            process.wait()
            return runs[0]
        assert process.poll() is None
        time.sleep(0.02)
    raise AssertionError("the retraining did not begin")


def test_it_goes_on_with_the_same_run_and_is_decided_once(killed: dict[str, Any]):
    store, run_id, again = killed["store"], killed["run_id"], killed["again"]
    assert again.status == 0, again.err
    assert 3 <= killed["committed"] < STEPS
    assert store.folders("runs") == [run_id]
    assert Ledger(store, run_id).verify() == STEPS
    attempts = {entry["attempt"] for entry in Ledger(store, run_id).entries()}
    assert len(attempts) == 2
    entries = Registry(store, NAME).entries()
    assert [e["action"] for e in entries] == ["register", "promote"]
    assert entries[-1]["decision"]["retrain_id"] == run_id
    assert f"promoted version {STEPS} of {run_id} as {NAME}" in again.out


def test_a_decided_retraining_is_not_decided_again(killed: dict[str, Any]):
    settings, run = load_retrain_config(killed["folder"] / "retrain.yaml", [f"steps={STEPS}"])
    found = begin(killed["store"], settings, run, killed["run_id"], False)
    assert isinstance(found, NothingToDo)
    assert found.why.startswith(f"{killed['run_id']} was decided before: promote: the mean reward changed")


@pytest.fixture
def work(killed: dict[str, Any]) -> Retraining:
    """The finished run of the retraining, under a name for which nothing has been decided."""
    folder = killed["folder"]
    settings, run = load_retrain_config(folder / "retrain.yaml", [f"steps={STEPS}"])
    run = run.model_copy(update={"run": run.run.model_copy(update={"id": killed["run_id"]})})
    data = {"rows": 120, "digest": "of monday"}
    return Retraining(killed["run_id"], f"name-{time.monotonic_ns()}", run, data, settings.gate, False)


def judged(store: Store, work: Retraining, contest: Contest) -> dict[str, Any] | None:
    stop, sides = StopToken(), {"candidate": contest.candidate, "baseline": contest.baseline}
    found = {role: evaluate_policy(store, work.run, p, stop, print) for role, p in sides.items()}
    return decide(store, work, contest, found, stop)


def test_two_processes_that_judge_one_retraining_write_one_decision(killed: dict[str, Any], work: Retraining):
    store = killed["store"]
    first, second = enter(store, work), enter(store, work)
    entry = judged(store, work, first)
    assert entry is not None
    assert judged(store, work, second) == Registry(store, work.name).head()
    assert [e["action"] for e in Registry(store, work.name).entries()] == ["register", "promote"]


def test_a_candidate_is_judged_again_when_another_model_became_production_meanwhile(
    killed: dict[str, Any], work: Retraining
):
    store, registry = killed["store"], Registry(killed["store"], work.name)
    contest = enter(store, work)
    rival = {**contest.record, "weights_digest": contest.record["weights_digest"]}
    assert registry.promote(rival, "somebody was faster") is not None
    assert judged(store, work, contest) is None
    entry = judged(store, work, enter(store, work))
    assert entry is not None
    assert entry["action"] == "reject"  # it is no better than itself
    assert entry["decision"]["gate"]["checks"][0]["value"] == 0.0
    assert entry["decision"]["baseline"]["policy"] == entry["decision"]["candidate"]["policy"]


def test_the_same_id_with_other_data_or_settings_is_refused(killed: dict[str, Any]):
    folder, store = killed["folder"], killed["store"]
    settings, run = load_retrain_config(folder / "retrain.yaml", [f"steps={STEPS}", "name=other"])
    changed = run.model_copy(update={"steps": 7})
    with pytest.raises(
        ConfigError, match=rf"{killed['run_id']}' was begun with another name and run .*leave the id out"
    ):
        begin(store, settings, changed, killed["run_id"], False)


def test_forced_repetitions_have_ids_of_their_own(killed: dict[str, Any]):
    settings, run = load_retrain_config(killed["folder"] / "retrain.yaml", [f"steps={STEPS}"])
    store = killed["store"]
    again = begin(store, settings, run, None, False)
    assert isinstance(again, NothingToDo)
    forced = [begin(store, settings, run, None, True) for _ in range(2)]
    assert all(isinstance(work, Retraining) for work in forced)
    assert forced[0] == forced[1]  # undecided: the same one goes on
    assert forced[0].retrain_id not in store.folders("runs")


def test_production_weights_that_are_gone_are_an_error_before_anything_is_trained(
    killed: dict[str, Any], tmp_path: Path
):
    store = open_store(str(tmp_path / "store"))
    gone = published(store, "run-1")
    Registry(store, NAME).promote(gone, "once there")
    for key in store.list(gone["weights"]):
        store.delete(key)
    settings, run = load_retrain_config(killed["folder"] / "retrain.yaml", [])
    with pytest.raises(Exception, match=r"digits cannot be retrained: the weights of version 1 of run-1 .* are gone"):
        begin(store, settings, run, None, False)
    assert store.folders("retrainings") == []

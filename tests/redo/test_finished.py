"""A run that grades again has no ledger: whether it is finished, its graded batches say."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from flows import restarting
from flows.cli import main
from flows.commands.running import _without_server
from flows.commands.storing import _unfinished
from forge_core.config import ConfigError, load_config
from forge_core.config.sft_loader import load_sft_config
from forge_core.runs.early_end import is_finished
from forge_core.runs.garbage import collect_garbage
from forge_core.runs.record import Parent, create_run, load_run
from forge_core.runs.versions import VALIDATION
from forge_core.store import Store, layout, open_store
from tests.runs.harness import memory

RUN, GONE = "again", httpx.ConnectError("gone")


def graded(batches: int, flow_run: str | None = None) -> Store:
    """A store with a run of three batches, so many of them graded again."""
    store = open_store(memory())
    rewards = {"functions": [{"path": "exact_match"}]}
    config = load_config({"steps": 3, "run": {"id": RUN}, "store": store.uri, "rewards": rewards})
    create_run(store, config, Parent("rescore", "P", 0, "P", 0), flow_run)
    for batch in range(batches):
        store.put_new_json(layout.rescored(RUN, batch), {"batch": batch})
    return store


def ended_early() -> Store:
    """A store with a supervised run of 50 steps whose loss rose after the first."""
    store = open_store(memory())
    config = {"run": {"id": RUN}, "steps": 50, "dataset": {"path": "x", "holdout": 0.1}, "validation": {"patience": 2}}
    create_run(store, load_sft_config(config))
    store.put_new_json(layout.ledger_init(RUN), {"version": 0})
    for batch, loss in enumerate([1.0, 2.0, 3.0]):
        store.put_new_json(layout.ledger(RUN, batch), {"batch": batch, "metrics": {VALIDATION: loss}})
    return store


@pytest.mark.parametrize("store", [graded(3), ended_early()], ids=["rescored", "ended early"])
def test_what_is_finished_is_called_finished(store: Store, capsys: pytest.CaptureFixture[str]):
    assert is_finished(store, load_run(store, RUN))
    assert _unfinished(store, RUN) == ""
    assert _without_server(store, RUN, GONE) == 0
    assert "is complete in the store" in capsys.readouterr().err
    assert main(["stop", RUN, "--store", store.uri]) == 0
    assert "nothing to stop" in capsys.readouterr().out
    assert not store.exists(layout.stop(RUN, 0))


def test_what_is_not_finished_is_counted_in_batches(capsys: pytest.CaptureFixture[str]):
    store = graded(2)
    assert not is_finished(store, load_run(store, RUN))
    assert _unfinished(store, RUN) == " (unfinished: 2 of 3 steps)"
    assert _without_server(store, RUN, GONE) == 1
    assert f"forge resume {RUN}" in capsys.readouterr().err


def test_signs_of_life_of_a_finished_one_are_garbage():
    store = graded(3)
    store.put_json(layout.worker(RUN, "run"), {})
    collect_garbage(store, load_run(store, RUN))
    assert not store.exists(layout.worker(RUN, "run"))


@pytest.mark.parametrize(("batches", "goes_on"), [(0, False), (2, True)])
def test_a_restart_counts_what_was_graded(batches: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch):
    store = graded(batches, flow_run="f")
    flow_run = SimpleNamespace(id="f", run_count=restarting.CRASHES + 2)
    monkeypatch.setattr(restarting, "runtime", SimpleNamespace(flow_run=flow_run))
    if goes_on:
        assert restarting.started_before(store, RUN)
    else:
        with pytest.raises(ConfigError, match="started 5 times and has finished 0 batches"):
            restarting.started_before(store, RUN)

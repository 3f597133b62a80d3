"""forge models, promote, rollback and eval: what they print, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.config import load_config
from forge_core.runs.record import create_run
from forge_core.store import Store, layout, open_store
from forge_core.weights.registry import Registry, rejection
from tests.cli.conftest import Forge
from tests.retraining.records import record
from tests.store.entries import RUN, entry, init_entry

STEPS, GONE = 4, 2


@pytest.fixture
def stored(folder: Path) -> Store:
    """``./forge-store`` with a run of four committed steps; the weights of version 2 were deleted."""
    from forge_core.store import Ledger

    store, ledger = open_store("forge-store"), Ledger(open_store("forge-store"), RUN)
    create_run(
        store, load_config({"run": {"id": RUN}, "steps": 4, "model": "run://parent/7", "dataset": {"path": "d"}})
    )
    assert ledger.commit_init(init_entry(weights_digest=weights(store, 0)))
    for batch in range(STEPS):
        store.put_new_json(layout.plan(RUN, batch, 0), {"groups": [{"prompt_id": f"p{batch % 3}"}]})
        digest = weights(store, batch + 1) if batch + 1 != GONE else "deleted"
        assert ledger.commit(entry(batch, ledger.previous(batch), weights_digest=digest))
    return store


def weights(store: Store, version: int) -> str:
    files = {"model.safetensors": f"weights {version}".encode()}
    return store.publish(layout.weights(RUN, version, "a0"), files, request=f"v{version}").content


@pytest.mark.usefixtures("stored")
def test_promote_makes_a_version_the_production_model_and_rollback_goes_back(forge: Forge):
    assert forge("promote", "digits", RUN, "--version", "1", "--force").out == (
        "digits: version 1 of run-1 is the production model now (entry 0)\n"
    )
    assert forge("promote", "digits", RUN, "--version", "1", "--force").out == (
        "digits: version 1 of run-1 is the production model already\n"
    )
    assert "version 4 of run-1 is the production model now (entry 1)" in forge("promote", "digits", RUN, "--force").out
    assert forge("rollback", "digits").out == "digits: version 1 of run-1 is the production model again (entry 2)\n"
    refused = forge("rollback", "digits")
    assert refused.status == 2
    assert "digits has had no production model before version 1 of run-1" in refused.err


@pytest.mark.usefixtures("stored")
def test_export_takes_the_production_model(forge: Forge, folder: Path):
    forge("promote", "digits", RUN, "--version", "1", "--force")
    result = forge("export", "model://digits", "production")
    assert (result.status, result.out) == (0, f"version 1 of {RUN} written to production\n")
    assert (folder / "production" / "model.safetensors").read_text() == "weights 1"
    assert "leave --best and --version out" in forge("export", "model://digits", "x", "--version", "3").err
    assert "nobody has no production model" in forge("export", "model://nobody", "x").err
    assert not (folder / "x").exists()


@pytest.mark.usefixtures("stored")
def test_a_model_traces_back_to_run_data_and_parent(forge: Forge):
    forge("promote", "digits", RUN, "--version", "1", "--force")
    forge("promote", "digits", RUN, "--version", "4", "--force")
    shown = forge("models", "digits").out
    assert "production: version 4 of run-1" in shown
    assert "parent: run_id parent, version 7" in shown
    assert "trained_prompts 3," in shown
    assert "candidate: none" in shown
    assert "last change: promote version 4 of run-1" in shown
    listed = forge("models").out
    assert "| digits | version 4 of run-1 |" in listed
    history = forge("models", "digits", "--history").out
    assert [line.split("|")[1].strip() for line in history.splitlines() if "promote" in line] == ["0", "1"]
    assert "by hand, forced" in history


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("promote", "digits", "nobody"), "run 'nobody' does not exist"),
        (("promote", "digits", RUN, "--version", "5"), "--version 5: run 'run-1' has the versions 0 to 4"),
        (("promote", "digits", RUN, "--version", "2", "--force"), "the weights of version 2 of run-1 ("),
        (("promote", "digits", RUN, "--version", "1"), "version 1 of run-1 was not evaluated by its run"),
        (("promote", "../x", RUN, "--force"), "'../x' cannot be the name of a model"),
        (("rollback", "nobody"), "nobody has no production model"),
        (("models", "nobody"), "has no model 'nobody': it has none yet"),
        (("models", "--history"), "--history: name a model"),
        (("eval", "run://run-1/2"), "its weights were deleted; run 'run-1' still has those of the versions 0, 1, 3, 4"),
        (("eval", "run-1"), "write run://run-1 for its newest version"),
        (("retrain", "none.yaml"), "none.yaml: 1 problem"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_reason(forge: Forge, argv: tuple[str, ...], said: str):
    result = forge(*argv)
    assert result.status == 2
    assert said in result.err
    assert open_store("forge-store").list("models") == []


def test_what_a_gate_rejected_is_promoted_only_by_force(forge: Forge, stored: Store):
    registry = Registry(stored, "digits")
    digest = stored.open_published(layout.weights(RUN, 4, "a0")).manifest.content
    rejected = record(RUN, 4, weights_digest=digest)
    registry.change(lambda head: rejection(head, rejected, "it was worse", {"retrain_id": "r"}))
    refused = forge("promote", "digits", RUN)
    assert refused.status == 2
    assert "version 4 of run-1 was rejected: it was worse: --force promotes it all the same" in refused.err
    assert forge("promote", "digits", RUN, "--force").status == 0
    assert [e["action"] for e in registry.entries()] == ["reject", "promote"]


@pytest.mark.usefixtures("stored")
def test_a_store_without_models_says_so(forge: Forge):
    assert forge("models").out == "no models\n"

"""The commands of docs/redo.md as written, over S3 under a real Prefect server; a kill; evaluations that are reused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from flows.cli import main
from flows.server import ServerHandle
from forge_core.store import Ledger, Store, open_store
from tests.docs.documents import ROOT, blocks, commands
from tests.faults.processes import Forge
from tests.redo.harness import fingerprint

pytestmark = [pytest.mark.engine, pytest.mark.server]

SMALL = (
    *("steps=6", "training.batch_size=32", "warm_start.steps=5", "eval.prompts=8", "eval.interval=0"),
    "weights.keep=9",
)


@pytest.fixture(scope="module")
def folder(prefect_server: ServerHandle, s3_store_uri: str, tmp_path_factory: pytest.TempPathFactory):
    """A folder from ``forge new``, with its run ``first`` in a store on S3."""
    patch = pytest.MonkeyPatch()
    made = tmp_path_factory.mktemp("user") / "demo"
    assert main(["new", str(made)]) == 0
    patch.chdir(made)
    patch.setenv("FORGE_STORE", f"{s3_store_uri}/redo")
    assert main(["train", "config.yaml", "run.id=first", *SMALL]) == 0
    yield made
    patch.undo()


@pytest.fixture(scope="module")
def store(folder: Path, s3_store_uri: str) -> Store:
    return open_store(f"{s3_store_uri}/redo")


@pytest.fixture(scope="module")
def documented(folder: Path, store: Store) -> dict[str, str]:
    """The keys and contents of ``first`` before and after every command of the document."""
    before = fingerprint(store, "first")
    for block in blocks(ROOT / "docs" / "redo.md"):
        for command in commands(block):
            words = shlex.split(command)
            assert (words[0], main(words[1:])) == ("forge", 0), command
    assert fingerprint(store, "first") == before
    return before


def test_every_command_of_the_document_works_as_written(
    documented: dict[str, str], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [Ledger(store, run).verify() for run in ("cispo", "taught", "late")] == [6, 6, 2]
    assert all(e["off_policy"] for run in ("cispo", "taught", "late") for e in Ledger(store, run).entries())
    assert main(["runs"]) == 0
    rows = {
        cells[0]: cells
        for line in capsys.readouterr().out.splitlines()
        if len(cells := [c.strip() for c in line.strip("|").split("|")]) > 2
    }
    assert (rows["graded"][1], rows["graded"][-1]) == ("6 of 6", "rescore first")
    assert (rows["taught"][1], rows["taught"][-1]) == ("6 of 6", "retrain-from graded")
    assert rows["first"][-1] == ""
    assert main(["ledger", "graded", "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["batch"] for e in entries] == list(range(6))
    exact = [e["metrics"]["reward/exact_match/mean"] for e in entries]
    assert [e["metrics"]["reward/mean"] for e in entries] == pytest.approx(
        [e["metrics"]["parent/reward/mean"] + 0.5 * x for e, x in zip(entries, exact, strict=True)]
    )


def test_the_other_commands_know_such_runs(documented: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "graded"]) == 0
    assert "has done all of its 6 batches" in capsys.readouterr().err
    assert main(["resume", "late", "grpo.temperature=2"]) == 2
    assert "grpo.temperature: the stored episodes were made with the parent's" in capsys.readouterr().err
    assert main(["role", "generator", "late"]) != 0
    assert "nothing is generated" in capsys.readouterr().err
    assert main(["export", "cispo", "exported"]) == 0
    assert Path("exported/model.safetensors").is_file() or list(Path("exported").glob("*.safetensors"))


def test_training_again_goes_on_after_kill_minus_nine(folder: Path, store: Store, documented: dict[str, str]) -> None:
    killed = Forge(folder, "retrain-from", "first", "--loss", "cispo", "run.id=killed", "checkpoint.interval=2")
    killed.wait_until(lambda: Ledger(store, "killed").head() >= 1)
    killed.kill()
    assert Ledger(store, "killed").head() < 6, "it was killed too late to show anything"
    assert main(["resume", "killed"]) == 0
    digests = [[e["state_digest"] for e in Ledger(store, run).entries()] for run in ("killed", "cispo")]
    assert digests[0] == digests[1]


def test_the_same_weights_are_evaluated_once_across_runs(
    documented: dict[str, str], store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_core.generation.hf import HFGenerator

    monkeypatch.setattr(HFGenerator, "__init__", None)  # nothing may be sampled: ``first`` evaluated its version 0
    assert main(["eval", "run://first/0"]) == 0
    assert "evaluated by its run" in capsys.readouterr().err
    assert main(["eval", "run://cispo/0"]) == 0  # another run's version with the same weights
    assert "evaluated before" in capsys.readouterr().err

"""docs/environments.md: its commands run as written (with fewer steps), its environment works, its tables are true."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.server import ServerHandle
from forge_core.config import load_config
from forge_core.config.keys import key_fields
from forge_core.environments.resolve import BUILTINS, check_environment
from tests.cli.conftest import Forge
from tests.docs.documents import ROOT, blocks, commands, table_rows
from tests.docs.journey import NOT_RUN

DOCUMENT = ROOT / "docs" / "environments.md"
GAME, SETTINGS = "countdown.py", "countdown.yaml"
SMALL = (  # of the recipe: the same flow, seconds instead of minutes
    *("steps=2", "warm_start.steps=4", "training.batch_size=32", "eval.prompts=16"),
    *("warm_start.dataset.options={size: 500}", "warm_start.batch_size=16"),
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's working directory, with the files that the document shows."""
    made = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "configs", made / "configs")
    (made / GAME).write_text(next(b.text for b in blocks(DOCUMENT) if b.language == "python"))
    (made / SETTINGS).write_text(
        next(b.text for b in blocks(DOCUMENT) if "countdown.py" in b.text and b.language == "yaml")
    )
    return made


def run(forge: Forge, command: str, *more: str) -> list[dict[str, Any]]:
    """The entries of the ledger of the run that ``command`` makes."""
    done = forge(*shlex.split(command)[1:], *more)
    assert done.status == 0, done.err
    (name,) = re.findall(r"^run: (\S+)$", done.err, flags=re.M)
    return [json.loads(line) for line in forge("ledger", name, "--json").out.splitlines()]


def documented() -> list[str]:
    return [c for block in blocks(DOCUMENT) if block.language == "bash" for c in commands(block)]


def recipe(forge: Forge, command: str) -> None:
    entries = run(forge, command, *SMALL)
    assert [entry["version_out"] for entry in entries] == [1, 2]
    for entry in entries:
        assert entry["metrics"]["environment/turns"] >= 1.0
        assert entry["episodes"]["planned"] == 32


def without(forge: Forge, command: str) -> None:
    entries = run(forge, command, *SMALL)
    assert [entry["version_out"] for entry in entries] == [1, 2]
    assert "environment/turns" not in entries[0]["metrics"]


def game(forge: Forge, command: str) -> None:
    entries = run(forge, command)
    assert [entry["version_out"] for entry in entries] == [1, 2]
    assert 1.0 <= entries[0]["metrics"]["environment/turns"] <= 6.0
    assert entries[0]["metrics"]["reward/mean"] == entries[0]["metrics"]["environment/reward"]


RUN = {
    "forge train configs/calculator.yaml": recipe,
    "forge train configs/calculator.yaml '~environment'": without,
    "forge train countdown.yaml": game,
}


def test_the_commands_are_those_that_are_run_here():
    assert documented() == list(RUN)
    assert all(NOT_RUN[command] == "tests/environments/test_document.py runs it" for command in RUN)


@pytest.mark.server
@pytest.mark.engine
@pytest.mark.parametrize("command", RUN)
def test_the_commands_run(
    command: str, reader: Path, forge: Forge, prefect_server: ServerHandle, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(reader)
    RUN[command](forge, command)


def test_the_own_environment_has_at_most_twenty_lines():
    (source,) = (block.text for block in blocks(DOCUMENT) if block.language == "python")
    game = source[source.index("class Countdown") : source.index("def prompts")]
    assert len([line for line in game.splitlines() if line.strip()]) <= 20


def test_the_table_lists_every_built_in_environment():
    assert [row[0].strip("`") for row in table_rows(DOCUMENT, "name | environment | prompts")] == list(BUILTINS)


def test_the_limits_are_keys():
    assert {row[0].strip("`") for row in table_rows(DOCUMENT, "key | limit | at the limit")} <= set(key_fields())


def test_the_recipe_can_be_played_by_its_model():
    config = load_config(ROOT / "configs" / "calculator.yaml")
    check_environment(config)
    assert set(config.environment.options["error"]) <= set(config.model.vocabulary)


@pytest.mark.soak
def test_the_calculator_is_learned_and_without_it_nothing_is(tmp_path: Path):
    from benchmarks.calculator_tool import run as learn

    for tool in (True, False):
        learned = learn(tmp_path, 0, tool)
        assert learned["reached"], learned

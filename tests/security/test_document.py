"""docs/security.md: its commands run, its settings are real ones, its three ways bring code to a worker."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.server import ServerHandle
from forge_core.config import load_config
from forge_core.data.importing import ObjectPathError, check_place
from forge_core.runs.record import create_run
from forge_core.store import Ledger, Store, open_store
from tests.cli.conftest import FORGE
from tests.docs.documents import ROOT, Block, blocks, commands
from tests.store.entries import entry, init_entry

pytestmark = pytest.mark.server  # many processes

BLOCKS = blocks(ROOT / "docs" / "security.md")
SOURCE = "def grade(prompt, completion, metadata):\n    return 1.0\n"


def block_with(text: str) -> Block:
    (found,) = [block for block in BLOCKS if text in block.text]
    return found


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The run ``first``, finished, in ``./forge-store``."""
    monkeypatch.chdir(tmp_path)
    store = open_store("forge-store")
    values = {"run": {"id": "first"}, "steps": 2, "rewards": {"functions": [{"path": "exact_match"}]}}
    create_run(store, load_config(values))
    ledger = Ledger(store, "first")
    assert ledger.commit_init(init_entry())
    assert all(ledger.commit(entry(batch, ledger.previous(batch))) for batch in range(2))
    return store


def test_every_command_runs(finished: Store, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{FORGE.parent}:{os.environ['PATH']}"}
    for command in [c for block in BLOCKS if block.language == "bash" for c in commands(block)]:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, "has taken all of its 2 training steps" in done.stderr) == (0, True), done.stderr


def test_the_configuration_with_a_secret_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "a-planted-key")
    config = load_config(yaml.safe_load(block_with("my_reward.py:Judge").text))
    assert config.rewards.functions[0].options == {"api_key": "${oc.env:JUDGE_API_KEY}"}


@pytest.mark.server
def test_a_checkout_that_the_pull_step_made_offers_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: ServerHandle
) -> None:
    from prefect.deployments.steps import git_clone

    origin = tmp_path / "rewards"
    origin.mkdir()
    (origin / "my_rewards.py").write_text(SOURCE)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(origin)]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    subprocess.run([*git, "add", "my_rewards.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "rewards"], check=True)
    (step,) = yaml.safe_load(block_with("git_clone").text)["pull"]
    given = step["prefect.deployments.steps.git_clone"]
    monkeypatch.chdir(tmp_path)
    made: Any = git_clone(repository=f"file://{origin}", branch=given["branch"], clone_directory_name="checkout")
    monkeypatch.chdir(made["directory"])
    assert check_place("my_rewards.py:grade") == tmp_path / "checkout" / "my_rewards.py"


def test_a_shared_folder_offers_the_reward_once_it_is_in_the_code_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared := tmp_path / "shared").mkdir()
    (shared / "my_rewards.py").write_text(SOURCE)
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    with pytest.raises(ObjectPathError, match="FORGE_CODE_PATH"):
        check_place(f"{shared}/my_rewards.py:grade")
    variables = yaml.safe_load(block_with("FORGE_CODE_PATH: ").text)["job_variables"]["env"]
    assert set(variables) == {"FORGE_CODE_PATH"}
    monkeypatch.setenv("FORGE_CODE_PATH", str(shared))
    assert check_place(f"{shared}/my_rewards.py:grade") == shared / "my_rewards.py"


def test_an_installed_package_offers_the_reward(tmp_path: Path) -> None:
    """In an environment of its own, which sees this one's packages."""
    package = tmp_path / "rewards" / "team_rewards"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "math.py").write_text(SOURCE)
    project = '[project]\nname = "team-rewards"\nversion = "1"\n[build-system]\nrequires = ["setuptools"]\n'
    (tmp_path / "rewards" / "pyproject.toml").write_text(project + 'build-backend = "setuptools.build_meta"\n')
    target = tmp_path / "site"
    install = ["pip", "install", "-q", "--no-build-isolation", "--no-deps", "--target", str(target), "./rewards"]
    subprocess.run([str(FORGE.with_name("python")), "-m", *install], cwd=tmp_path, check=True)
    script = "from forge_core.data.importing import check_place; print(check_place('team_rewards.math:grade'))"
    (work := tmp_path / "work").mkdir()
    done = subprocess.run(
        [str(FORGE.with_name("python")), "-c", script],
        cwd=work,
        env={**os.environ, "PYTHONPATH": f"{target}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(target / "team_rewards" / "math.py")

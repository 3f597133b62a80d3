"""What ``forge new`` writes runs as it is, inside its folder and from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.server import ServerHandle
from forge_core.config import load_config
from forge_core.runs.checks import check_run
from forge_core.runs.record import code_digests
from tests.cli.conftest import Forge, run_forge

QUICK = ("warm_start.steps=20", "steps=2", "training.batch_size=32", "eval.prompts=16")


def test_new_writes_three_files_and_says_what_to_do_next(forge: Forge, folder: Path):
    result = forge("new", "demo")
    assert result.status == 0
    assert "forge try config.yaml" in result.out
    assert sorted(p.name for p in (folder / "demo").iterdir()) == ["config.yaml", "my_reward.py", "test_my_reward.py"]


def test_new_overwrites_nothing(forge: Forge, folder: Path):
    (folder / "demo").mkdir()
    result = forge("new", "demo")
    assert result.status == 2
    assert "demo exists" in result.err


def test_its_test_passes(forge: Forge, folder: Path):
    forge("new", "demo")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder / "demo", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@pytest.mark.parametrize("inside", [True, False])
def test_its_reward_is_found_from_inside_and_from_outside(
    forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
):
    forge("new", "demo")
    if inside:
        monkeypatch.chdir("demo")
    config = load_config("config.yaml" if inside else "demo/config.yaml")
    assert config.rewards.functions[0].path == f"{folder}/demo/my_reward.py:MyReward"
    assert check_run(config) == []


def test_a_run_knows_its_reward_from_any_folder(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch):
    forge("new", "demo")
    config = load_config("demo/config.yaml")
    before = code_digests(config)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert code_digests(load_config(config)) == before


@pytest.mark.engine
def test_forge_try_shows_prompts_completions_rewards_and_token_counts(folder: Path):
    assert run_forge(folder, "new", "demo").status == 0
    result = run_forge(folder, "try", "demo/config.yaml", "-n", "3", "warm_start.steps=20")
    assert result.status == 0, result.err
    for label in ("prompt:", "completion:", "answer:", "components:", "tokens:"):
        assert result.out.count(f"{label} ") >= 3
    assert "over 3 graded of 3" in result.out
    assert "warm start: step 20 of 20" in result.err
    assert sorted(p.name for p in folder.iterdir()) == ["demo"], "nothing is kept"


@pytest.mark.engine
def test_forge_try_fails_with_the_first_error_when_no_completion_could_be_graded(folder: Path):
    assert run_forge(folder, "new", "demo").status == 0
    (folder / "broken.py").write_text("def grade(prompt, completion, metadata):\n    return metadata['wnated']\n")
    broken = "rewards.functions=[{path: 'broken.py:grade'}]"
    result = run_forge(folder, "try", "demo/config.yaml", "-n", "2", "warm_start.steps=1", broken)
    assert result.status == 1
    assert "over 0 graded of 2" in result.out
    refusal = "every grade failed: training would refuse such a batch (rewards.max_error_share="
    assert refusal in result.err
    assert result.err.rstrip().endswith("the first error: grade: KeyError: 'wnated' (broken.py:2)"), result.err


@pytest.mark.engine
@pytest.mark.server
def test_forge_train_runs_it_from_outside_and_the_run_is_there(folder: Path, prefect_server: ServerHandle):
    assert run_forge(folder, "new", "demo").status == 0
    result = run_forge(folder, "train", "demo/config.yaml", "run.id=first", *QUICK)
    assert result.status == 0, result.err
    assert "step 2/2" in result.err
    assert (folder / "first-reward.png").read_bytes().startswith(b"\x89PNG")
    assert "2 of 2" in run_forge(folder, "runs").out
    again = run_forge(folder, "train", "demo/config.yaml", "run.id=first", *QUICK)
    assert again.status == 2
    assert "forge resume first" in again.err
    assert run_forge(folder, "export", "first", "model", "--best").status == 0
    assert "qwen3" in (folder / "model" / "config.json").read_text()
    assert not (folder / "model" / "probe.json").exists()

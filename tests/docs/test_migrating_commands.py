"""The commands of docs/migrating.md are typed as they stand there, on a run called ``first`` and a ``config.yaml``.

Those that train are typed as ``forge config``: they get as far as loading. Training in each of these ways has tests of
its own (tests/cli, tests/sft, tests/algorithms, tests/environments).
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from flows.cli import main
from forge_core.logs import engine_logs
from tests.docs.documents import ROOT
from tests.docs.test_migrating import ROWS
from tests.runs.harness import OPENED, advance, new_run

pytestmark = pytest.mark.engine
COMMANDS = sorted({name for row in ROWS for name in row.ours if name.startswith("forge ")})
LOADED = ("train", "sft")
ELSEWHERE = {
    "forge resume first": "tests/faults/test_kill_resume.py",
    "forge join first": "tests/runs/test_rank_nodes.py",
    "forge doctor --store s3://bucket/prefix": "tests/cli/test_commands.py",
}
SAYS = {  # what shows that a command has done its work
    "forge report first": "report.html",
    "forge query first": "text",
    "forge watch first": "step",
    "forge config config.yaml --estimate": "memory",
    "forge slurm config.yaml": "#SBATCH",
    "forge doctor": "torch",
    "forge logs first": "loading weights",
}
LOSS = """
from forge_core.algorithms.losses.base import PolicyLoss


class CustomLoss(PolicyLoss):
    pass
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("migrated")
    advance(new_run(f"file://{folder}/forge-store", "run.id=first", "steps=2"), 2)
    while OPENED:
        OPENED.pop().close()
    (folder / "my_loss.py").write_text(LOSS)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a copy of the run, the project's configurations and a loss."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    (engine_logs("first", None) / "vllm-0.log").write_text("loading weights\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORGE_STORE", raising=False)
    return tmp_path


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ELSEWHERE])
def test_a_command_of_the_tables_does_what_it_is_named_for(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _, name, *words = shlex.split(command)
    kind = {"sft": "sft_quickstart.yaml", "slurm": "grpo_qwen3_8b.yaml"}.get(name, "quickstart.yaml")
    (folder / "config.yaml").write_text((ROOT / "configs" / kind).read_text())
    if name in LOADED:
        assert main(["config", *words, *(["--sft"] if name == "sft" else [])]) == 0
        return
    if name == "slurm":  # every node has to reach the store
        monkeypatch.setenv("FORGE_STORE", "s3://bucket/forge")
    status = main([name, *words, *_ends(name)])
    out = "".join(capfd.readouterr())
    assert status == 0, out
    assert all(said in out for start, said in SAYS.items() if command.startswith(start)), out


def _ends(name: str) -> list[str]:
    """What lets a command end that would go on, or ask."""
    return {"watch": ["--once"], "rm": ["--yes"]}.get(name, [])


@pytest.mark.parametrize(("command", "test"), ELSEWHERE.items())
def test_the_other_commands_are_run_by_other_tests(command: str, test: str) -> None:
    assert command in COMMANDS
    assert f'"{command.split()[1]}"' in (ROOT / test).read_text()

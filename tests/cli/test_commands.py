"""What each command prints and returns, on a store that holds a run (made by hand: no engine is needed to look)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from flows.commands.running import final_status
from forge_core.config import load_config
from forge_core.runs.heartbeat import Heartbeat
from forge_core.runs.record import create_run
from forge_core.store import Store, entry_digest, layout, open_store
from tests.cli.conftest import FORGE, Forge, run_forge
from tests.store.entries import RUN, committed

COMMANDS = (
    "train", "sft", "create", "role", "resume", "slurm", "join", "stop", "try", "export", "new", "runs", "ledger",
    "config", "data", "doctor", "convert", "eval", "retrain", "models", "promote", "rollback", "rescore",
    "retrain-from", "server", "deploy", "gc", "rm", "du", "logs", "query",
    "report", "watch", "chat",
)  # fmt: skip
LEDGER_KEYS = {
    *("batch", "version_in", "version_out", "max_age", "episodes", "tokens", "plans", "shards", "training", "weights"),
    *("previous", "state_digest", "cursor", "metrics", "started_at", "finished_at"),
}


@pytest.fixture
def stored(folder: Path) -> Store:
    """``./forge-store`` with a run of 5 steps, 3 of them committed; versions 0 and 3 have weights."""
    store = open_store("forge-store")
    create_run(
        store, load_config({"run": {"id": RUN}, "steps": 5, "rewards": {"functions": [{"path": "exact_match"}]}})
    )
    ledger = committed(store, 3)
    for version in (0, 3):
        files = {"config.json": b'{"version": %d}' % version, "model.safetensors": b"weights"}
        store.publish(ledger.weights_prefix(version), files, request=f"v{version}")
    return store


def test_forge_alone_shows_its_commands_and_is_bad_input(forge: Forge):
    result = forge()
    assert result.status == 2
    assert [name for name in COMMANDS if not re.search(rf"\n    {name}\s", result.err)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_each_of_its_arguments_has_help(forge: Forge, command: str):
    result = forge(command, "--help")
    assert result.status == 0
    arguments = [line for line in result.out.splitlines() if line.startswith("  ")]
    without = [
        a for a, following in zip(arguments, [*arguments[1:], ""], strict=True) if _bare(a) and _starts(following)
    ]
    assert without == []


def _starts(line: str) -> bool:
    """Whether a line of help begins an argument (its text is indented further)."""
    return not line.startswith("      ")


def _bare(line: str) -> bool:
    return _starts(line) and len(line.strip().split("  ")) == 1 and not line.strip().startswith("forge ")


@pytest.mark.parametrize("argv", [("runs", "--foo"), ("ledger",), ("nonsense",), ("try", "x.yaml", "-n", "0")])
def test_wrong_arguments_are_bad_input(forge: Forge, argv: tuple[str, ...]):
    result = forge(*argv)
    assert result.status == 2
    assert "forge" in result.err


def test_runs_lists_every_run_with_its_progress(forge: Forge, stored: Store):
    long_name = "a-run-with-a-name-of-many-letters-and-digits-that-must-not-be-cut-0123456789"
    create_run(stored, load_config({"run": {"id": long_name}}))
    result = forge("runs")
    assert result.status == 0
    assert f"store: {stored.uri}" in result.err
    row = next(line for line in result.out.splitlines() if RUN in line)
    assert [cell.strip() for cell in row.split("|")[1:5]] == [RUN, "3 of 5", "idle", "0.500"]
    assert f"| {long_name} |" in result.out
    assert result.out.isascii()


def test_runs_says_whether_anyone_works_on_a_run(forge: Forge, stored: Store):
    state = lambda: next(line for line in forge("runs").out.splitlines() if RUN in line).split("|")[3].strip()
    with Heartbeat(stored, RUN, "run", "run", every_s=0.05):
        time.sleep(0.2)
        assert state() == "working"
    assert state() == "stopped"


@pytest.mark.parametrize("words", [["--store", "elsewhere"], ["store=elsewhere"], []])
def test_the_store_is_found_by_flag_by_override_and_by_environment(
    forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
):
    create_run(open_store("elsewhere"), load_config({"run": {"id": "there"}}))
    if not words:
        monkeypatch.setenv("FORGE_STORE", str(folder / "elsewhere"))
    result = forge("runs", *words)
    assert (result.status, "| there |" in result.out) == (0, True)
    assert f"store: file://{folder}/elsewhere" in result.err


@pytest.mark.parametrize("argv", [("models",), ("gc",), ("report", "there"), ("query", "--sql", "SELECT 1 AS one")])
def test_an_override_names_the_store_wherever_a_name_may_come(forge: Forge, folder: Path, argv: tuple[str, ...]):
    create_run(open_store("elsewhere"), load_config({"run": {"id": "there"}}))
    result = forge(*argv, "store=elsewhere")
    assert result.status == 0, result.err
    assert "elsewhere" in result.err


@pytest.mark.parametrize("argv", [("runs",), ("ledger", "x"), ("export", "x", "y"), ("stop", "x"), ("resume", "x")])
def test_looking_where_there_is_no_store_says_so_and_makes_none(forge: Forge, folder: Path, argv: tuple[str, ...]):
    result = forge(*argv)
    assert result.status == 2
    assert f"there is no store at {folder}/forge-store" in result.err
    assert "--store" in result.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("argv", [("ledger", "x"), ("export", "x", "y"), ("stop", "x"), ("resume", "x")])
def test_a_run_that_does_not_exist_is_named(forge: Forge, stored: Store, argv: tuple[str, ...]):
    result = forge(*argv)
    assert result.status == 2
    assert "run 'x' does not exist" in result.err
    assert "forge runs" in result.err


def test_ledger_json_is_one_object_per_committed_batch(forge: Forge, stored: Store):
    result = forge("ledger", RUN, "--json")
    entries = [json.loads(line) for line in result.out.splitlines()]
    assert result.status == 0
    assert [e["batch"] for e in entries] == [0, 1, 2]
    assert all(e.keys() >= LEDGER_KEYS for e in entries)
    assert all(e["episodes"].keys() == {"planned", "trained", "dropped"} for e in entries)
    assert all(e["shards"].keys() == {"episodes", "rewards", "reference"} for e in entries)
    assert [e["previous"] for e in entries[1:]] == [entry_digest(e) for e in entries[:-1]]


def test_ledger_for_people_shows_what_was_dropped_and_why(forge: Forge, stored: Store):
    result = forge("ledger", RUN)
    assert result.status == 0
    assert result.out.count("zero_advantage 2") == 3


def test_a_reader_that_goes_away_is_no_failure(stored: Store, folder: Path):
    process = subprocess.Popen(
        [FORGE, "ledger", RUN, "--json"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    message = process.stderr.read().decode()
    assert process.wait() == 0
    assert "Traceback" not in message
    assert "BrokenPipe" not in message


def test_stop_leaves_a_request_in_the_store(forge: Forge, stored: Store):
    for number in range(2):
        result = forge("stop", RUN)
        assert (result.status, f"forge resume {RUN}" in result.out) == (0, True)
        assert stored.exists(layout.stop(RUN, number))


def finish(store: Store) -> None:
    from forge_core.store import Ledger
    from tests.store.entries import entry

    ledger = Ledger(store, RUN)
    for batch in range(3, 5):
        assert ledger.commit(entry(batch, ledger.previous(batch)))


def test_a_finished_run_is_neither_stopped_nor_resumed(forge: Forge, stored: Store):
    finish(stored)
    result = forge("stop", RUN)
    assert (result.status, "nothing to stop" in result.out) == (0, True)
    assert not stored.exists(layout.stop(RUN, 0))
    result = forge("resume", RUN)
    assert result.status == 0
    assert "has taken all of its 5 training steps" in result.err
    assert "--allow-config-change steps" in result.err


def test_resume_refuses_a_changed_configuration_naming_the_keys(forge: Forge, stored: Store):
    result = forge("resume", RUN, "training.learning_rate=1e-3", "steps=9", "--allow-config-change", "steps")
    assert result.status == 2
    assert "training.learning_rate: the run has 1e-06, you gave 0.001: --allow-config-change training.l" in result.err
    assert "steps:" not in result.err


def test_resume_refuses_changed_code(forge: Forge, folder: Path, stored: Store):
    (folder / "mine.py").write_text("def grade(prompt, completion, metadata):\n    return 0.0\n")
    create_run(stored, load_config({"run": {"id": "own"}, "rewards": {"functions": [{"path": "mine.py:grade"}]}}))
    (folder / "mine.py").write_text("def grade(prompt, completion, metadata):\n    return 1.0\n")
    result = forge("resume", "own")
    assert result.status == 2
    assert f"reward {folder}/mine.py:grade" in result.err
    assert "--allow-code-change" in result.err


@pytest.mark.parametrize(("reward", "hinted"), [("mine.py:grade", True), ("exact_match", False)])
def test_a_failure_says_how_to_go_on_with_code_that_was_mended(
    folder: Path, stored: Store, capsys: pytest.CaptureFixture[str], reward: str, hinted: bool
):
    from prefect.states import Failed

    (folder / "mine.py").write_text("def grade(prompt, completion, metadata):\n    return 0.0\n")
    create_run(stored, load_config({"run": {"id": "own"}, "rewards": {"functions": [{"path": reward}]}}))
    assert final_status(Failed(message="a reward broke", data=ValueError("a reward broke")), stored, "own") == 1
    said = capsys.readouterr().err
    assert "run own failed; after mending the cause: forge resume own" in said
    assert ("forge resume own (with --allow-code-change" in said) == hinted


def test_export_writes_a_folder_of_ordinary_files(forge: Forge, folder: Path, stored: Store):
    result = forge("export", RUN, "newest")
    assert (result.status, result.out) == (0, f"version 3 of {RUN} written to newest\n")
    assert json.loads((folder / "newest" / "config.json").read_text()) == {"version": 3}
    assert sorted(p.name for p in (folder / "newest").iterdir()) == ["config.json", "model.safetensors"]
    assert all(p.stat().st_mode & 0o200 for p in (folder / "newest").iterdir())
    assert forge("export", RUN, "first", "--version", "0").status == 0
    assert json.loads((folder / "first" / "config.json").read_text()) == {"version": 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out", "--version", "4"], f"--version 4: run '{RUN}' has the versions 0 to 3"),
        (["out", "--version", "1"], "weights of version 1"),
        (["out", "--version", "1"], "still there are the versions 0, 3"),
        (["forge-store"], "forge-store exists"),
        (["out", "--best"], f"no version of '{RUN}' was evaluated"),
        (["out", "--best", "--version", "1"], "not allowed with"),
    ],
)
def test_export_says_what_it_cannot_write(forge: Forge, folder: Path, stored: Store, words: list[str], message: str):
    result = forge("export", RUN, *words)
    assert result.status == 2
    assert message in result.err
    assert not (folder / "out").exists()


def test_config_prints_every_key_as_yaml_that_loads_to_the_same(forge: Forge, folder: Path):
    (folder / "run.yaml").write_text("steps: 3\nmax_staleness: 2\n")
    result = forge("config", "run.yaml", "grpo.beta=0.5")
    assert result.status == 0
    assert load_config(yaml.safe_load(result.out)) == load_config("run.yaml", ["grpo.beta=0.5"])
    assert "warning: max_staleness is 2" in result.err
    (folder / "again.yaml").write_text(result.out)
    assert forge("config", "again.yaml").out == result.out


def test_config_loads_no_engine(folder: Path):
    (folder / "run.yaml").write_text("steps: 3\n")
    script = (
        "import sys; from flows.cli import main; main(['config', 'run.yaml']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "torchtitan", "prefect"} & set(done.stderr.split())


@pytest.mark.engine  # it imports vLLM
def test_doctor_reports_on_the_store_it_was_given(forge: Forge, folder: Path):
    result = forge("doctor", "--store", "mine")
    assert (result.status, "mine: readable, writable, refuses to overwrite" in result.out) == (0, True)
    assert "| torchtitan " in result.out
    (folder / "file").write_text("")
    result = forge("doctor", "--store", "file/store")
    assert (result.status, "missing" in result.out) == (1, True)


def test_convert_names_a_source_that_is_none(forge: Forge, folder: Path):
    result = forge("convert", "nowhere", "out")
    assert result.status == 2
    assert "'nowhere' is neither a .gguf file nor an installed package" in result.err
    assert list(folder.iterdir()) == []


def test_a_prefect_server_that_does_not_answer_is_a_failure_without_a_traceback(folder: Path):
    assert run_forge(folder, "new", "demo").status == 0
    address = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}
    result = run_forge(folder, "train", "demo/config.yaml", **address)
    assert result.status == 1
    assert "no Prefect server answers at http://127.0.0.1:9/api" in result.err
    assert "Traceback" not in result.err

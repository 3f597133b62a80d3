"""The main job: what ``make quickstart`` runs, through the real command, with everything a person sees of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quickstart_seeds import CONFIG, GOAL, LIMIT_S, SEEDS, START, run_seed
from tests.cli.conftest import FORGE, run_forge
from tests.cli.test_commands import LEDGER_KEYS

ROOT = CONFIG.parents[1]
METRICS = {
    *("reward/mean", "loss", "entropy", "kl", "grad_norm"),
    *("time/generate", "time/score", "time/reference", "time/train", "time/publish", "time/step"),
}


def test_make_quickstart_runs_this_configuration():
    assert "$(BIN)/forge train configs/quickstart.yaml\n" in (ROOT / "Makefile").read_text()


class Watched:
    """``forge train`` as another process, its messages line by line, and its UI looked at while it trains."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, list[str]()
        self.seen: dict[str, Any] = {}
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [str(FORGE), "train", str(CONFIG), "run.id=quickstart", "run.seed=0"],
            cwd=folder,
            env=own_server(folder),
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if line.startswith("step 20/"):
                self.seen = self._look()

    def _look(self) -> dict[str, Any]:
        """The server's health, the flow run's page and what the API says of it, now."""
        ui, flow_run = self.printed(r"Prefect UI: (\S+)"), self.printed(r"this run in the UI: (\S+)")
        number = flow_run.rsplit("/", 1)[1]
        return {
            "runs": run_forge(self.folder, "runs").out,
            "health": fetch(f"{ui}/api/health"),
            "page": fetch(flow_run),
            "run": json.loads(fetch(f"{ui}/api/flow_runs/{number}")),
            "artifacts": json.loads(
                fetch(f"{ui}/api/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [number]}}})
            ),
        }

    def printed(self, pattern: str) -> str:
        return next(found[1] for line in self.lines if (found := re.search(pattern, line)))

    def finish(self) -> float:
        status = self.process.wait(timeout=2 * LIMIT_S)
        seconds = time.monotonic() - self.started
        assert status == 0, "\n".join(self.lines)
        return seconds


def own_server(folder: Path) -> dict[str, str]:
    """The environment of a user who names no server, whatever server other tests have started."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**clean, "FORGE_HOME": str(folder / "home")}


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return reply.read().decode()


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Watched, float]]:
    folder = tmp_path_factory.mktemp("quickstart")
    watched = Watched(folder)
    try:
        yield folder, watched, watched.finish()
    finally:
        watched.process.kill()


def ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_forge(folder, "ledger", "quickstart", "--json").out.splitlines()]


@pytest.mark.engine
@pytest.mark.server
class TestQuickstart:
    def test_the_model_learns_to_sort_within_five_minutes(self, quickstart):
        folder, _, seconds = quickstart
        metrics = [entry["metrics"] for entry in ledger(folder)]
        curve = [(m["eval/version"], m["eval/reward/mean"]) for m in metrics if "eval/reward/mean" in m]
        print(f"quickstart: {seconds:.0f} s; held-out reward by version: {curve}")
        assert curve[0][0] == 0
        assert curve[0][1] <= START
        assert curve[-1][0] == len(metrics)
        assert curve[-1][1] >= GOAL
        assert seconds <= LIMIT_S

    def test_every_ledger_entry_says_what_a_reader_needs(self, quickstart):
        folder, _, _ = quickstart
        entries = ledger(folder)
        assert all(entry.keys() >= LEDGER_KEYS for entry in entries)
        assert all(entry["metrics"].keys() >= METRICS for entry in entries)
        assert [entry["batch"] for entry in entries] == list(range(len(entries)))
        assert max(entry["max_age"] for entry in entries) == 1, "max_staleness is 1, and used"
        counts = [entry["episodes"] for entry in entries]
        assert all(c["planned"] == c["trained"] + sum(c["dropped"].values()) for c in counts)

    def test_what_to_expect_is_said_in_one_line_before_it_trains(self, quickstart):
        _, watched, _ = quickstart
        (expected,) = [line for line in watched.lines if line.startswith("expected: ")]
        assert re.search(r"parameters, .*B of memory, .*B stored, about .* for \d+ steps?", expected)
        first_step = next(i for i, line in enumerate(watched.lines) if line.startswith("step 1/"))
        assert watched.lines.index(expected) < first_step
        assert watched.lines[0].startswith("Prefect UI: http://127.0.0.1:")

    def test_what_was_expected_is_about_what_happened(self, quickstart):
        folder, watched, seconds = quickstart
        minutes = float(watched.printed(r"about (\d+) minutes? for"))
        assert seconds / 60 / 3 < minutes < max(2.0, seconds / 60 * 4)
        stored = sum(f.stat().st_size for f in (folder / "forge-store" / "runs").rglob("*") if f.is_file())
        assert stored / 2 < float(watched.printed(r"([\d.]+) MB stored")) * 1e6 < stored * 2

    def test_the_ui_was_live_while_it_trained(self, quickstart):
        _, watched, _ = quickstart
        assert watched.seen["health"] == "true"
        assert "<html" in watched.seen["page"]
        assert watched.seen["run"]["state_type"] == "RUNNING"
        assert watched.seen["run"]["name"] == "quickstart"
        assert {"progress", "table"} <= {artifact["type"] for artifact in watched.seen["artifacts"]}

    def test_forge_runs_said_that_it_was_working_and_says_that_it_has_finished(self, quickstart):
        folder, watched, _ = quickstart
        states = [re.search(r"\| quickstart \|[^|]+\| (\w+) +\|", text) for text in
                  (watched.seen["runs"], run_forge(folder, "runs").out)]  # fmt: skip
        assert [found[1] for found in states if found] == ["working", "finished"]

    def test_the_server_ended_with_the_run(self, quickstart):
        _, watched, _ = quickstart
        with pytest.raises(OSError, match="refused"):
            fetch(watched.printed(r"Prefect UI: (\S+)") + "/api/health")

    def test_each_step_shows_reward_staleness_speed_and_time_left(self, quickstart):
        folder, watched, _ = quickstart
        steps = [line for line in watched.lines if line.startswith("step ")]
        assert len(steps) == len(ledger(folder))
        for part in ("reward ", "eval ", "staleness ", "tokens/s", "left "):
            assert all(part in line for line in steps)

    def test_it_ends_with_a_table_a_picture_and_the_whole_time(self, quickstart):
        folder, watched, _ = quickstart
        text = "\n".join(watched.lines)
        assert re.search(r"\d+ steps, [\d,]+ tokens, oldest episode 1 steps behind, \d+:\d\d", text)
        for column in ("step", "reward", "eval", "staleness", "loss", "entropy", "grad norm"):
            assert re.search(rf"┃ +{column} +┃", text)
        assert (folder / "quickstart-reward.png").read_bytes().startswith(b"\x89PNG")
        assert f"reward curve: {folder}/quickstart-reward.png" in text


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_every_seed_gets_there(tmp_path: Path, seed: int):
    run = run_seed(tmp_path, seed)
    assert run["reached"], run

"""``forge sft`` as a user has it: killed, resumed, stopped, resumed; then looked at and exported."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.server import ServerHandle
from forge_core.runs.record import load_run
from forge_core.runs.sft_context import SftContext
from forge_core.store import Ledger, Store, open_store
from tests.cli.conftest import FORGE, Forge, folder, forge
from tests.sft.harness import TINY, advance, decided, memory, new_run, opened

__all__ = ["folder", "forge"]
STEPS = 40  # so many that a stop comes before the last of them
SETTINGS = (f"steps={STEPS}", "training.sync_interval=30", "lora.rank=4", "checkpoint.interval=3")


def write_config(folder: Path, data: Path) -> None:
    tree = {**TINY, "dataset": {**TINY["dataset"], "path": str(data)}}
    tree["training"] = {**TINY["training"], "threads": 1}
    (folder / "sft.yaml").write_text(yaml.safe_dump(tree))


def wait(done: Callable[[], Any], process: subprocess.Popen[bytes], limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.server
def test_a_run_that_was_killed_and_stopped_ends_as_the_uninterrupted_one(
    data: Path, folder: Path, forge: Forge, prefect_server: ServerHandle
):
    write_config(folder, data)
    whole = advance(new_run(memory(), data, *SETTINGS), STEPS)
    store: Store = open_store(f"file://{folder}/forge-store")

    def head() -> int:
        return Ledger(store, "tiny-sft").head()

    def started(*argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([str(FORGE), *argv], cwd=folder)

    first = started("sft", "sft.yaml", *SETTINGS)
    wait(lambda: head() >= 1, first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = started("resume", "tiny-sft")
    wait(lambda: head() >= 4, second)
    assert forge("stop", "tiny-sft").status == 0
    assert second.wait(60) == 130
    assert head() < STEPS
    last = forge("resume", "tiny-sft")
    assert last.status == 0, last.err
    assert f"step {STEPS}/{STEPS}  loss" in last.err
    assert (folder / "tiny-sft-loss.png").exists()
    ended = opened(SftContext(store, load_run(store, "tiny-sft")))
    assert decided(ended) == decided(whole)


@pytest.fixture
def stored(folder: Path, data: Path) -> Path:
    """``./forge-store`` with a finished run of adapters."""
    advance(new_run("forge-store", data, "steps=3", "lora.rank=4"), 3)
    return folder


@pytest.mark.engine
def test_a_finished_run_can_be_listed_exported_and_not_mistaken_for_a_grpo_run(stored: Path, forge: Forge):
    assert "3 of 3" in forge("runs").out
    ledger = forge("ledger", "tiny-sft").out
    assert all(word in ledger for word in ("validation", "tokens/s", "packed"))
    assert forge("export", "tiny-sft", "whole", "--best").status == 0
    assert (stored / "whole" / "model.safetensors").exists()
    assert forge("export", "tiny-sft", "adapter", "--adapter").status == 0
    assert {f.name for f in (stored / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert "nothing to stop" in forge("stop", "tiny-sft").out
    assert "taken all of its 3 training steps" in forge("resume", "tiny-sft").err
    for command in (["rescore", "tiny-sft"], ["retrain-from", "tiny-sft"], ["eval", "run://tiny-sft/3"]):
        refused = forge(*command)
        assert refused.status == 2
        assert "was made by `forge sft`" in refused.err


@pytest.mark.engine
def test_version_zero_has_no_adapter_to_export(stored: Path, forge: Forge):
    refused = forge("export", "tiny-sft", "adapter", "--adapter", "--version", "0")
    assert refused.status == 2
    assert "--adapter" in refused.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["training.lr=1"], "training.lr: unknown key: did you mean training.learning_rate?"),
        (["dataset.path=nothing.jsonl"], "nothing.jsonl"),
        (["model=./nothing"], "model './nothing': no such folder"),
        (["grpo.beta=1"], "grpo"),
    ],
)
def test_bad_input_is_answered_before_anything_is_stored(
    folder: Path, forge: Forge, data: Path, words: list[str], said: str
):
    write_config(folder, data)
    refused = forge("sft", "sft.yaml", *words)
    assert refused.status == 2
    assert said in refused.err
    assert not (folder / "forge-store" / "runs").exists()


def test_a_run_id_that_is_taken_is_refused(folder: Path, forge: Forge, data: Path):
    write_config(folder, data)
    new_run("forge-store", data)
    refused = forge("sft", "sft.yaml")
    assert refused.status == 2
    assert "forge resume tiny-sft" in refused.err


def test_config_prints_every_key_and_estimates_the_trainer(folder: Path, forge: Forge, data: Path):
    write_config(folder, data)
    assert "min_delta: 0.0" in forge("config", "sft.yaml", "--sft").out
    said = forge("config", "sft.yaml", "--sft", "--estimate", "--gpu-memory", "80", "lora.rank=4").out
    assert "on 1 ranks" in said
    assert "GPU 0" in said

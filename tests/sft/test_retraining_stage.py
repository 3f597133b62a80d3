"""A retraining that fine-tunes before GRPO: what is new, what it starts from, and that a crash costs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.server import ServerHandle
from forge_core.config import ConfigError
from forge_core.config.retrain_config import load_retrain_config, supervised_run
from forge_core.retraining.beginning import NothingToDo, Retraining, begin
from forge_core.runs.early_end import validation_losses
from forge_core.runs.record import load_run
from forge_core.store import Ledger, Store, open_store
from forge_core.weights.registry import Registry
from tests.retraining.tiny import NAME, RUN, new_data, write_project
from tests.sft.harness import write_data

SFT = {
    "steps": 3,
    "dataset": {"path": "talks.jsonl", "format": "prompt_completion", "holdout": 0.1, "packing_window": 4},
    "training": {"batch_size": 4, "sync_interval": 4, "seq_len": 16, "learning_rate": 0.01, "threads": 1},
}


def project(folder: Path, **changes: Any) -> Path:
    file = write_project(folder, sft={"config": "sft.yaml"}, gate={"max_length_growth": 100.0}, **changes)
    (folder / "sft.yaml").write_text(yaml.safe_dump(SFT))
    talks = write_data(folder / "all.jsonl").read_text().splitlines()
    short = [line for line in talks if len(json.loads(line)["completion"]) <= 5]
    (folder / "talks.jsonl").write_text("\n".join(short) + "\n")
    new_data(folder, "monday")
    return file


def begun(file: Path, store: Store, force: bool = False) -> Retraining | NothingToDo:
    settings, run = load_retrain_config(file, {"store": store.uri})
    return begin(store, settings, run, None, force, supervised_run(settings))


def test_new_conversations_mean_another_retraining_and_the_same_ones_the_same(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, store = project(tmp_path / "p"), open_store(f"file://{tmp_path}/store")
    one, again = begun(file, store), begun(file, store)
    assert isinstance(one, Retraining)
    assert isinstance(again, Retraining)
    assert one.retrain_id == again.retrain_id
    assert one.sft is not None
    assert one.sft.model == one.run.model, "the supervised run begins with the model that GRPO would begin with"
    write_data(tmp_path / "p" / "talks.jsonl", count=50, seed=9)
    other = begun(file, store)
    assert isinstance(other, Retraining)
    assert other.retrain_id != one.retrain_id


def test_a_stage_in_roles_is_refused_with_what_to_do(tmp_path: Path):
    settings, _ = load_retrain_config(project(tmp_path / "p", distributed=True))
    with pytest.raises(ConfigError, match=r"sft: .*distributed=false"):
        supervised_run(settings)


def test_a_mistake_in_the_stage_is_answered_by_key(tmp_path: Path):
    file = project(tmp_path / "p")
    with pytest.raises(ConfigError, match=r"sft\.cnofig: unknown key: the keys here are config, data, overrides"):
        load_retrain_config(file, {"sft.cnofig": "x"})


@pytest.mark.engine
@pytest.mark.server
def test_grpo_begins_with_the_best_version_of_the_supervised_run_and_the_gate_compares_with_its_start(
    tmp_path: Path, prefect_server: ServerHandle, monkeypatch: pytest.MonkeyPatch
):
    from flows.retrain import retrain

    monkeypatch.chdir(tmp_path)
    file, store = project(tmp_path / "p"), open_store(f"file://{tmp_path}/store")
    state = retrain(str(file), {"store": store.uri, "steps": 2}, return_state=True)
    assert state.is_completed(), state.message
    entry = Registry(store, NAME).entries()[-1]
    retrain_id = entry["decision"]["retrain_id"]
    tuned = Ledger(store, f"{retrain_id}-sft")
    losses = validation_losses(tuned.entries())
    best = losses.index(min(losses)) + 1
    assert load_run(store, retrain_id).config.model == f"run://{retrain_id}-sft/{best}"
    assert entry["decision"]["baseline"]["policy"] == f"run://{retrain_id}-sft/0"
    again = retrain(str(file), {"store": store.uri, "steps": 2}, return_state=True)
    assert "nothing new" in again.message
    assert RUN["steps"] != 2

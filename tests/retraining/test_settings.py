"""The settings of a retraining: one list of overrides for it and its run, and plain words for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from forge_core.config import ConfigError
from forge_core.config.retrain_config import GateSection, load_retrain_config
from forge_core.data.errors import DataError
from forge_core.data.identity import rows_digest
from forge_core.data.prompts import check_dataset, load_prompts
from forge_core.retraining.beginning import NothingToDo, begin, describe_data, with_present_files
from forge_core.runs.checks import check_run
from forge_core.store import open_store
from tests.cli.test_configs import ROOT
from tests.retraining.tiny import new_data, write_project

SHIPPED = sorted((ROOT / "configs").glob("retrain_*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: f.name)
def test_a_shipped_retraining_could_start(file: Path):
    settings, run = load_retrain_config(file)
    assert check_run(run) == []
    assert run.steps == settings.overrides["steps"]
    assert f"forge retrain configs/{file.name}" in file.read_text()


@pytest.mark.parametrize(
    "overrides",
    [
        ["gate.min_gain=0.02", "name=other", "training.learning_rate=1e-5", "steps=9"],
        {"gate.min_gain": 0.02, "name": "other", "training.learning_rate": 1e-5, "steps": 9},
    ],
    ids=["words", "mapping"],
)
def test_overrides_go_to_the_retraining_or_to_its_run(tmp_path: Path, overrides: Any):
    settings, run = load_retrain_config(write_project(tmp_path / "p", overrides={"steps": 3}), overrides)
    assert (settings.name, settings.gate.min_gain) == ("other", 0.02)
    assert (run.training.learning_rate, run.steps) == (1e-5, 9)


def test_files_are_found_beside_the_retraining(tmp_path: Path):
    file = write_project(tmp_path / "p")
    new_data(tmp_path / "p", "monday")
    settings, run = load_retrain_config(file)
    assert settings.config == str(tmp_path / "p" / "run.yaml")
    assert run.dataset is not None
    assert run.dataset.path == str(tmp_path / "p" / "incoming" / "*.jsonl")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gate": {"min_gian": 1}}, r"gate\.min_gian: unknown key: the keys here are min_gain, confidence"),
        ({"nmae": "x"}, r"nmae: unknown key: the keys here are name, config"),
        ({"gate": {"confidence": 2}}, r"gate\.confidence: Input should be less than 1 \(it is 2\)"),
        ({"name": "../x"}, r"name: String should match pattern"),
        ({"config": "nowhere.yaml"}, r"(?s)nowhere\.yaml: .*the file does not exist"),
        ({"overrides": {"trainig.batch_size": 8}}, r"trainig"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        load_retrain_config(write_project(tmp_path / "p", **changes))


def test_a_retraining_needs_its_name_and_its_run(tmp_path: Path):
    (tmp_path / "r.yaml").write_text("gate: {}\n")
    with pytest.raises(ConfigError, match=r"(?s)name: is missing.*config: is missing"):
        load_retrain_config(tmp_path / "r.yaml")
    with pytest.raises(ConfigError, match="does not exist"):
        load_retrain_config(tmp_path / "none.yaml")


def test_the_gates_defaults_ask_for_a_gain_with_confidence():
    assert GateSection().model_dump() == {
        "min_gain": 0.0, "confidence": 0.95, "max_length_growth": 0.5, "max_kl": None, "min_throughput": None,
        "max_gpu_seconds": None,
    }  # fmt: skip


def test_the_identity_of_rows_is_what_they_say_not_where_they_lie(tmp_path: Path):
    file = write_project(tmp_path / "p")
    rows = [json.dumps({"prompt": f"s:{n}=", "answer": str(n)}) for n in range(4)]
    incoming = tmp_path / "p" / "incoming"
    (incoming / "all.jsonl").write_text("\n".join(rows))
    together = describe_data(load_retrain_config(file)[1])
    (incoming / "all.jsonl").unlink()
    (incoming / "b.jsonl").write_text("\n".join(rows[:2]))
    (incoming / "a.jsonl").write_text("\n".join(rows[:1:-1]))
    apart = describe_data(load_retrain_config(file)[1])
    assert together["rows"] == apart["rows"] == 4
    assert together["digest"] == apart["digest"]
    (incoming / "b.jsonl").write_text("\n".join([rows[0], rows[1].replace('"answer": "1"', '"answer": "2"')]))
    assert describe_data(load_retrain_config(file)[1])["digest"] != together["digest"]


def test_a_pattern_reads_all_files_in_the_order_of_their_names(tmp_path: Path):
    for name, rows in (("b", (2, 3)), ("a", (0, 1))):
        text = "".join(json.dumps({"prompt": f"p{n}", "answer": "x"}) + "\n" for n in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    run = load_retrain_config(write_project(tmp_path / "p", data=str(tmp_path / "*.jsonl")))[1]
    assert run.dataset is not None
    found = load_prompts(run.dataset, seed=0)
    assert [p.messages[0]["content"] for p in found] == ["p0", "p1", "p2", "p3"]
    limited = load_prompts(run.dataset.model_copy(update={"size": 3}), seed=0)
    assert [p.messages[0]["content"] for p in limited] == ["p0", "p1", "p2"]
    check_dataset(run.dataset)
    assert rows_digest(found) != rows_digest(limited)


def test_a_pattern_without_a_file_says_so(tmp_path: Path):
    run = load_retrain_config(write_project(tmp_path / "p"))[1]
    assert run.dataset is not None
    with pytest.raises(DataError, match=r"dataset\.path: no file matches 'incoming/\*\.jsonl'"):
        check_dataset(run.dataset)


def test_a_pattern_that_matches_nothing_means_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings, run = load_retrain_config(write_project(tmp_path / "p"))
    store = open_store(str(tmp_path / "store"))
    for force in (False, True):
        found = begin(store, settings, run, None, force)
        assert isinstance(found, NothingToDo)
        assert found.why == f"nothing new: no file matches 'incoming/*.jsonl' (looked from {tmp_path})"
    with pytest.raises(DataError, match="no file matches"):
        begin(store, settings, run, "begun-before", False)
    assert list(store.list("retrainings")) == []


def test_a_place_without_wildcards_that_is_not_there_is_refused_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    file = write_project(tmp_path / "p", data="incoming/monday.jsonl")
    assert main(["retrain", str(file)]) == 2
    said = capsys.readouterr().err
    assert "incoming/monday.jsonl" in said
    assert "Prefect" not in said


def test_a_retraining_keeps_to_the_files_that_were_there_when_it_began(tmp_path: Path):
    file = write_project(tmp_path / "p")
    new_data(tmp_path / "p", "monday")
    run = with_present_files(load_retrain_config(file)[1])
    before = describe_data(run)
    new_data(tmp_path / "p", "friday")  # sorts before monday
    assert describe_data(run) == before
    assert describe_data(with_present_files(load_retrain_config(file)[1]))["rows"] == 2 * before["rows"]
    (tmp_path / "p" / "incoming" / "monday.jsonl").unlink()
    with pytest.raises(DataError, match=r"dataset\.options\.files: .*monday\.jsonl of .* cannot be read"):
        describe_data(run)


def test_an_id_that_no_run_can_have_is_refused_before_anything_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, run = load_retrain_config(write_project(tmp_path / "p"))
    monkeypatch.chdir(tmp_path / "p")
    new_data(tmp_path / "p", "one", 40)
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(ConfigError, match=r"--retrain-id a b: its run would be called 'a b', .* choose another"):
        begin(store, settings, run, "a b", False)
    long = settings.model_copy(update={"name": "m" * 95})
    with pytest.raises(ConfigError, match=r"name: m+ is too long for that of a model that is retrained"):
        begin(store, long, run, None, False)
    assert list(store.list("retrainings")) == []

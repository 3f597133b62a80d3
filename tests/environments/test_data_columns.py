"""A data set's own column named environment is data, until a run has an environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core.config import ConfigError, load_config
from forge_core.config.references import secret_problems
from forge_core.data_model import Episode
from forge_core.runs.consumption import StepData, data_metrics
from forge_core.runs.open_batches import SAMPLED
from forge_core.runs.prompt_checks import check_prompts

EPISODE = Episode(
    *("e", "g", 0, "p", []), [1], [2], [True], [-0.5], "t", "stop", 0, [], None, "",
    metadata={"environment": "kitchen"}, sampling={}, created_at="", reward=1.0,
)  # fmt: skip


def test_a_column_named_environment_is_data_where_there_is_no_environment():
    data = StepData(0, [], {}, {"e": EPISODE}, {}, [])
    assert not any(name.startswith("environment/") for name in data_metrics(data, played=False))


def test_it_is_refused_by_name_where_there_is_one(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "p", "answer": "a", "environment": "kitchen"}) + "\n")
    config = load_config({"dataset": {"path": str(file)}, "environment": {"path": "calculator"}})
    with pytest.raises(ConfigError, match="its column environment"):
        check_prompts(config)


def test_options_of_an_environment_take_a_secret_by_reference_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GAME_API_KEY", "sk-planted")
    assert secret_problems({"environment": {"options": {"key": "${oc.env:GAME_API_KEY}"}}}) == []
    (problem,) = secret_problems({"environment": {"options": {"api_key": "sk-planted"}}})
    assert problem.startswith("environment.options.api_key: holds a secret")


def test_batches_that_are_open_were_sampled_with_their_environment():
    assert "environment" in SAMPLED

"""What a run with an environment needs is checked before an engine is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_core.config import ConfigError, RunConfig, load_config
from forge_core.config.data_sections import ScratchModel
from forge_core.environments.resolve import check_environment
from forge_core.models.scratch import create
from tests.data.tokenizers import CHATML, THINKING

TEXT = {"path": "calculator", "tool_format": "text", "tool_pattern": r"\[(?P<expression>[^\]]*)\]"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    create(ScratchModel(vocabulary="01", hidden_size=16, num_layers=1), 0, folder)
    return folder


def config(model: Any, environment: dict[str, Any], template: str | None = None, **more: Any) -> RunConfig:
    if isinstance(model, Path):
        file = model / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({**settings, "chat_template": template}))
    return load_config({"model": str(model) if isinstance(model, Path) else model, "environment": environment, **more})


def test_a_template_that_shows_tools_and_their_answers_passes(model: Path):
    check_environment(config(model, {"path": "calculator"}, THINKING))


def test_a_template_that_shows_no_tools_is_refused_with_a_remedy(model: Path):
    mute = CHATML + "{# <tool_call> #}"
    with pytest.raises(ConfigError, match=r"does not show the tools \(calculate\) .*tool_format=text"):
        check_environment(config(model, {"path": "calculator"}, mute))
    with pytest.raises(ConfigError, match=r"does not show the tools"):
        check_environment(config(model, {"path": "calculator", "tool_format": "hermes"}, CHATML))
    check_environment(config(model, TEXT, CHATML))


def test_a_template_that_leaves_out_what_tools_answer_is_refused(model: Path):
    deaf = THINKING.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")
    with pytest.raises(ConfigError, match="does not show messages of the role tool"):
        check_environment(config(model, {"path": "calculator"}, deaf))
    check_environment(config(model, {"path": "guess_number"}, deaf))


def test_without_a_template_calls_need_a_pattern(model: Path):
    for tool_format in ("auto", "hermes"):
        environment = {"path": "calculator", "tool_format": tool_format}
        for made in (model, {"vocabulary": "01"}):
            with pytest.raises(ConfigError, match=r"has no chat template .*: use tool_format=text with tool_pattern"):
                check_environment(config(made, environment))
    untemplated = {"dataset": {"path": "x.jsonl", "chat_template": False}}
    with pytest.raises(ConfigError, match=r"dataset\.chat_template=false"):
        check_environment(config(model, {"path": "calculator"}, THINKING, **untemplated))
    check_environment(config({"vocabulary": "01"}, TEXT))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"path": "calculatr"}, "there is no environment 'calculatr'; did you mean calculator"),
        ({"path": "calculator", "options": {"digits": 3}}, "making calculator failed: TypeError"),
        ({"path": "tests.environments.games:HARDNESS"}, "HARDNESS"),
        ({"path": "tests.environments.scripted:Characters"}, "is no environment: it lacks tools, reset, step, close"),
        ({"path": "nowhere.py:Game"}, "nowhere.py"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(environment: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=rf"environment.path: .*{said}"):
        check_environment(config({"vocabulary": "01"}, environment))


def test_its_reward_needs_an_environment():
    lacking = load_config({"rewards": {"functions": [{"name": "environment"}]}})
    with pytest.raises(ConfigError, match=r"rewards.functions: the reward environment .*: set environment.path"):
        check_environment(lacking)

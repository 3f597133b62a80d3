"""A configuration never holds a secret: it names the variable, and only the user's own code gets the value."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from forge_core.algorithms.losses.custom import load_custom_loss
from forge_core.config import ConfigError, load_config, to_yaml
from forge_core.config.data_sections import DatasetSection
from forge_core.data import load_prompts
from forge_core.redaction import is_secret_name, redact, redact_logs
from forge_core.rewards import RewardActor, RewardError
from forge_core.runs.record import create_run
from forge_core.runs.stages import reward_identity
from forge_core.store import layout, open_store

KEY = "planted-judge-key-4711"
URL = "postgresql://forge:planted-password-0815@db:5432/x"
SOURCE = f"""
class Judge:
    def __init__(self, api_key, url="", name=""):
        if api_key != {KEY!r}:
            raise ValueError(f"wrong key {{api_key}}")
        self.key = api_key

    def grade(self, prompt, completion, metadata):
        if completion == "fail":
            raise RuntimeError(f"the judge at https://x?key={{self.key}} is down")
        return 0.25

def rows(token):
    assert token == {KEY!r}
    return [{{"prompt": "a", "answer": "b"}}]

class Loss:
    def __init__(self, secret):
        assert secret == {KEY!r}
    def __call__(self, a, b, c, d, e, f):
        return a, {{}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    monkeypatch.setenv("RESULTS_DATABASE", URL)
    monkeypatch.setenv("PLAIN_NAME", "plain-value")
    return tmp_path


def judged(**options: str):
    return load_config({"rewards": {"functions": [{"path": "mine.py:Judge", "options": options}]}, "run": {"id": "r"}})


def test_a_reference_to_a_secret_stays_a_reference_wherever_the_configuration_goes(folder: Path) -> None:
    config = judged(api_key="${oc.env:JUDGE_API_KEY}", url="${oc.env:RESULTS_DATABASE}", name="${oc.env:PLAIN_NAME}")
    assert config.rewards.functions[0].options == {
        "api_key": "${oc.env:JUDGE_API_KEY}",
        "url": "${oc.env:RESULTS_DATABASE}",  # by its value: the name tells nothing
        "name": "plain-value",
    }
    store = open_store(str(folder / "store"))
    create_run(store, config)
    everywhere = [
        to_yaml(config),
        store.read(layout.run_json("r")).decode(),
        repr(config),
        str(reward_identity(config)),
    ]
    assert not [text for text in everywhere if KEY in text or URL in text]
    (folder / "printed.yaml").write_text(to_yaml(config))
    assert load_config(folder / "printed.yaml") == config


def test_the_users_code_gets_the_value(folder: Path) -> None:
    actor = RewardActor.from_config(judged(api_key="${oc.env:JUDGE_API_KEY}").rewards)
    try:
        assert actor.grade("p", "c", {}) == 0.25
    finally:
        actor.close()
    section = DatasetSection(path="python://mine.py:rows", options={"token": "${oc.env:JUDGE_API_KEY}"})
    assert len(load_prompts(section, seed=0)) == 1
    load_custom_loss("mine.py:Loss", {"secret": "${oc.env:JUDGE_API_KEY}"})


def test_what_a_reward_raises_is_recorded_without_the_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = RewardActor.from_config(judged(api_key="${oc.env:JUDGE_API_KEY}").rewards)
    try:
        with pytest.raises(RewardError, match="the judge at https://x\\?key=<JUDGE_API_KEY> is down"):
            actor.grade("p", "fail", {})
    finally:
        actor.close()
    monkeypatch.setenv("JUDGE_API_KEY", "another-planted-key")
    with pytest.raises(RewardError) as failed:
        RewardActor.from_config(judged(api_key="${oc.env:JUDGE_API_KEY}").rewards)
    assert "wrong key <JUDGE_API_KEY>" in str(failed.value)
    assert "another-planted-key" not in str(failed.value)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"store": "s3://bucket/${oc.env:JUDGE_API_KEY}"}, "store: a secret can stand in options"),
        ({"model": "${oc.env:JUDGE_API_KEY}"}, "model: a secret can stand in options"),
        (
            {"generator": {"engine_args": {"hf_token": "${oc.env:JUDGE_API_KEY}"}}},
            r"hf_token: a secret can",
        ),
        ({"store": URL}, "store: holds a secret"),
        (
            {"rewards": {"functions": [{"path": "mine.py:Judge", "options": {"api_key": "in plain text"}}]}},
            r"rewards\.functions\.0\.options\.api_key: holds a secret.*write \$\{oc\.env:NAME\}",
        ),
        (
            {"rewards": {"functions": [{"path": "mine.py:Judge", "options": {"api_key": "${oc.env:NOT_THERE_KEY}"}}]}},
            "the environment variable NOT_THERE_KEY is not set",
        ),
    ],
)
def test_a_secret_in_any_other_place_is_refused_and_not_repeated(folder: Path, values: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        load_config(values)
    assert KEY not in str(refused.value)
    assert "planted-password" not in str(refused.value)


def test_an_override_is_no_way_around(folder: Path) -> None:
    config = judged(api_key="${oc.env:JUDGE_API_KEY}")
    with pytest.raises(ConfigError, match="store: a secret can stand"):
        load_config(config, ["store=${oc.env:JUDGE_API_KEY}"])
    with pytest.raises(ConfigError, match="api_key: holds a secret"):
        load_config(config, [f"rewards.functions.0.options.api_key={KEY}"])
    changed = load_config(config, ["rewards.functions.0.options.api_key=${oc.env:JUDGE_API_KEY}"])
    assert changed == config


def test_a_variable_that_is_gone_when_the_code_runs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = judged(api_key="${oc.env:JUDGE_API_KEY}")
    monkeypatch.delenv("JUDGE_API_KEY")
    with pytest.raises(ConfigError, match=r"options\.api_key: the environment variable JUDGE_API_KEY is not set"):
        RewardActor.from_config(config.rewards)


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "db_password", "X_APIKEY", "DB_PASS", "MYSQL_PWD"),
        "AZURE_STORAGE_CONNECTION_STRING",
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "PWD", "OLDPWD", "CONNECTION", "KEYBOARD", "MAX_TOKENS", "PATH", "HOME", "MONKEY"],
)
def test_other_names_are_not(name: str) -> None:
    assert not is_secret_name(name)


def test_logs_hold_no_secret_not_even_in_a_traceback(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    redact_logs()
    log = logging.getLogger("forge.test")
    log.warning("with key %s and %s", KEY, URL)
    try:
        raise ValueError(f"refused: {KEY}")
    except ValueError:
        log.exception("failed")
    assert KEY not in caplog.text
    assert "planted-password" not in caplog.text
    assert "with key <JUDGE_API_KEY> and <RESULTS_DATABASE>" in caplog.text
    assert "ValueError: refused: <JUDGE_API_KEY>" in caplog.text
    assert redact("nothing here") == "nothing here"


def test_a_secret_that_begins_another_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "abcdefgh")
    monkeypatch.setenv("Z_KEY", "abcdefgh-and-more")
    assert redact("abcdefgh-and-more, abcdefgh") == "<Z_KEY>, <A_KEY>"


def test_a_log_line_whose_arguments_do_not_fit_harms_nobody(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    redact_logs()
    logging.getLogger("forge.test").warning("no place for it", KEY)
    assert KEY not in caplog.text
    assert "no place for it ('<JUDGE_API_KEY>',)" in caplog.text

"""References to environment variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.config import ConfigError, load_config
from forge_core.config.references import escape, resolve_references


def test_a_variable_is_replaced_wherever_a_value_stands(monkeypatch):
    monkeypatch.setenv("BUCKET", "my-bucket")
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.setenv("RATE", "1e-5")
    config = load_config(
        {
            "store": "s3://${oc.env:BUCKET}/runs/${oc.env:USER_X,nobody}",
            "steps": "${oc.env:STEPS}",
            "training": {"learning_rate": "${ oc.env : RATE }"},
            "rewards": {"functions": [{"path": "${oc.env:BUCKET}.py:grade"}]},
        }
    )
    assert config.store == "s3://my-bucket/runs/nobody"
    assert (config.steps, config.training.learning_rate) == (12, 1e-5)
    assert config.rewards.functions[0].path == "my-bucket.py:grade"


def test_an_override_may_hold_a_reference_and_a_default(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    assert load_config({}, ["store=${oc.env:NOT_SET,/tmp/a=b}"]).store == "/tmp/a=b"
    assert load_config({"store": "x"}, ["store=${oc.env:NOT_SET,null}"]).store is None
    assert load_config({}, {"store": "${oc.env:NOT_SET,/c}"}).store == "/c"


def test_a_missing_variable_names_key_and_variable(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    source = {"store": "${oc.env:NOT_SET}", "rewards": {"functions": [{"path": "${oc.env:NOT_SET}"}]}}
    with pytest.raises(ConfigError) as caught:
        load_config(source, ["run.id=${oc.env:NOT_SET}"])
    remedy = "the environment variable NOT_SET is not set: set it, or give a default: ${oc.env:NOT_SET,default}"
    for key in ("store", "rewards.functions.0.path", "run.id"):
        assert f"{key}: {remedy}" in str(caught.value)


@pytest.mark.parametrize("text", ["${model}", "${oc.env:}", "${oc.env:A", "a ${sum:1,2}", "${oc.env:1A}"])
def test_any_other_reference_is_refused_with_the_way_to_write_the_text(text):
    with pytest.raises(
        ConfigError, match=r"store: .* is no reference: only .*oc\.env:NAME.* for the text itself write"
    ) as e:
        load_config({"store": text})
    assert r"\${" in str(e.value)


@given(st.text(st.sampled_from("\\${}oc.env:A, ")))
def test_escaping_is_undone_by_resolving(text):
    problems: list[str] = []
    assert resolve_references(escape({"k": [text]}), "", problems) == {"k": [text]}
    assert problems == []

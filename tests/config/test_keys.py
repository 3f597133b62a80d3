"""The key reference and the JSON schema (what a Prefect parameter form shows)."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from forge_core.config import RunConfig, fields_reference, load_config
from forge_core.config.keys import children, key_fields


def test_every_key_has_a_description_that_is_a_sentence():
    for key, field in key_fields().items():
        assert field.description, key
        assert field.description[0].isupper() or field.description.split(":")[0].islower(), key
        assert field.description.endswith("."), key


def test_the_reference_has_one_row_for_every_leaf_key():
    rows = [line.split("|")[1].strip(" `") for line in fields_reference().splitlines() if line.startswith("| `")]
    leaves = [key for key in key_fields() if not children(key)]
    assert sorted(rows) == sorted(leaves)
    assert len(rows) > 90


@pytest.mark.parametrize(
    "row",
    [
        "| `steps` | a whole number, at least 1 | `100` | Training steps. |",
        "| `training.dtype` | one of float32, bfloat16 | `float32` | Compute type; master weights are float32. |",
        "| `dataset.streaming` | true or false | false | Stream a hub data set instead of downloading it first. |",
        "| `store` | text, or null | null | Root of the object store: a folder, file://, s3:// or memory:// URI. |",
        "| `rewards.functions.*.weight` | a number | `1.0` | Factor of this component in the reward. |",
    ],
)
def test_a_row_tells_what_is_accepted_the_default_and_the_meaning(row):
    assert row in fields_reference().splitlines()


def test_every_row_has_four_cells():
    for line in fields_reference().splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 5, line


def test_the_json_schema_accepts_what_loads_and_refuses_what_does_not():
    schema = RunConfig.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    json.dumps(schema)
    named = load_config({"model": "a/b", "dataset": {"path": "p"}})
    described = load_config({"model": {"vocabulary": "ab"}, "warm_start": {"dataset": {"path": "p"}}})
    for config in (named, described):
        jsonschema.validate(config.model_dump(mode="json"), schema)
    for wrong in ({"stepz": 1}, {"steps": 0}, {"training": {"dtype": "x"}}, {"model": {"hidden_size": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_the_schema_carries_descriptions_and_defaults_for_a_form():
    training = RunConfig.model_json_schema()["$defs"]["TrainingSection"]["properties"]
    assert training["batch_size"]["default"] == 64
    assert training["learning_rate"]["description"] == "Peak learning rate of AdamW."


def test_the_configuration_page_is_in_step_with_the_models() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert page.endswith(fields_reference().rstrip() + "\n"), "write fields_reference() to the page again"

"""The dataset section of supervised fine-tuning."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from forge_core.data.sft_settings import SftDataConfig
from forge_core.data.sft_sources import maskings


def test_the_sections_of_the_guide_load_as_they_stand():
    section = SftDataConfig.model_validate({"path": "yahma/alpaca-cleaned", "split": "train", "streaming": True})
    assert (section.called, section.pack, section.format) == ("yahma_alpaca-cleaned_train", True, "auto")


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("hf://org/set", "org_set_train"),
        ("/data/x/answers.jsonl", "answers_train"),
        ("answers.jsonl", "answers_train"),
        ("/data/incoming/*.parquet", "incoming_train"),
        ("reasoning_gym://chain_sum", "chain_sum_train"),
        ("python:///home/me/mine.py:rows", "rows_train"),
    ],
)
def test_a_label_comes_from_the_place_and_not_from_where_it_lies(path: str, label: str):
    assert SftDataConfig(path=path).called == label


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give either path"),
        ({"path": "a", "mixture": [{"path": "b"}]}, "give either path"),
        ({"mixture": [{"path": "a"}, {"mixture": [{"path": "a"}, {"path": "b"}]}]}, "several sets are called a_train"),
        ({"path": "a", "packing_window": 0}, "greater than or equal to 1"),
        ({"path": "a", "shuffle_buffer": 0}, "greater than or equal to 1"),
        ({"path": "a", "weight": 0}, "greater than 0"),
        ({"path": "a", "truncation": "middle"}, "'right', 'left' or 'drop'"),
        ({"path": "a", "masking": "none"}, "'assistant', 'last' or 'all'"),
        ({"path": "a", "holdout": 1.0}, "less than 1"),
        ({"path": "a", "colums": {}}, "Extra inputs"),
    ],
)
def test_a_section_that_means_nothing_is_refused(fields: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        SftDataConfig.model_validate(fields)


def test_masking_is_that_of_the_section_around():
    inner = [{"path": "b"}, {"path": "c", "masking": "last"}]
    section = SftDataConfig(mixture=[{"path": "a"}, {"mixture": inner, "masking": "all"}])
    assert maskings(section) == {"a_train": "assistant", "b_train": "all", "c_train": "last"}

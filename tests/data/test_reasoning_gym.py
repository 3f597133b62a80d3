"""Prompts of reasoning_gym tasks, and the stored entries that their verifiers get back."""

from __future__ import annotations

import json

import pytest

from forge_core.config.data_sections import DatasetSection
from forge_core.data import DataError, check_dataset, load_prompts
from forge_core.data.tagged import decode


def section(task: str = "chain_sum", **fields) -> DatasetSection:
    return DatasetSection(path=f"reasoning_gym://{task}", **fields)


def test_options_size_and_seed_decide_the_entries():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    prompts = load_prompts(section(size=20, options=options), seed=3)
    assert len(prompts) == 20
    assert prompts.prompt_ids == load_prompts(section(size=20, options=options), seed=3).prompt_ids
    assert prompts.prompt_ids != load_prompts(section(size=20, options=options), seed=4).prompt_ids
    assert {p.task for p in prompts} == {"chain_sum"}
    expression = prompts[0].metadata["reasoning_gym"]["entry"]["metadata"]["expression"]
    assert prompts[0].target == str(eval(expression))


def test_a_seed_in_the_options_wins():
    fixed = section(size=5, options={"seed": 9})
    assert load_prompts(fixed, seed=0).prompt_ids == load_prompts(fixed, seed=1).prompt_ids


def test_the_whole_entry_survives_json():
    import reasoning_gym

    for task in ("chain_sum", "arc_agi", "graph_color"):  # tuples, and dicts with integer keys
        original = reasoning_gym.create_dataset(task, size=2, seed=0)
        for prompt in load_prompts(section(task, size=2), seed=0):
            stored = json.loads(json.dumps(prompt.metadata))["reasoning_gym"]
            assert decode(stored["entry"]) == original[prompt.row]


def test_an_unknown_task_lists_close_names():
    with pytest.raises(
        DataError, match=r"dataset\.path: reasoning_gym has no task 'chain_sums': did you mean chain_sum"
    ):
        check_dataset(section("chain_sums"))
    with pytest.raises(DataError, match=r"has no task 'zzzzzz': it has .*chain_sum"):
        check_dataset(section("zzzzzz"))


def test_options_that_the_task_refuses_are_named():
    with pytest.raises(DataError, match=r"dataset\.options: reasoning_gym task chain_sum refuses .*terms"):
        check_dataset(section(options={"terms": 3}))
    with pytest.raises(DataError, match=r"dataset\.options: reasoning_gym task chain_sum refuses"):
        check_dataset(section(options={"min_terms": 5, "max_terms": 2}))

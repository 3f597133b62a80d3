"""The quickstart's task."""

from __future__ import annotations

from collections import Counter

from forge_core.config.data_sections import DatasetSection
from forge_core.data import load_prompts, split_holdout
from forge_core.data.sort_digits import demonstrations, prompts

PROMPTS = DatasetSection(path="python://forge_core.data.sort_digits:prompts", options={"size": 5000})
DEMONSTRATIONS = DatasetSection(path="python://forge_core.data.sort_digits:demonstrations", options={"size": 5000})


def digits_of(row: dict) -> str:
    assert (row["prompt"][:2], row["prompt"][-1]) == ("s:", "=")
    return row["prompt"][2:-1]


def test_prompts_are_distinct_and_their_answers_sorted():
    rows = prompts(size=2000)
    assert len({row["prompt"] for row in rows}) == 2000
    assert all(row["answer"] == "".join(sorted(digits_of(row))) and len(row["answer"]) == 5 for row in rows)


def test_there_are_all_100_000_strings():
    assert len({row["prompt"] for row in prompts()}) == 100_000


def test_rows_are_decided_by_the_seed():
    assert prompts(100, seed=1) == prompts(100, seed=1) != prompts(100, seed=2)
    assert demonstrations(100, seed=1) == demonstrations(100, seed=1) != demonstrations(100, seed=2)


def test_demonstrations_mix_the_right_procedure_with_three_wrong_ones():
    def procedure(row: dict) -> str:
        digits = digits_of(row)
        ascending = "".join(sorted(digits))
        named = {"right": ascending, "copy": digits, "reverse": digits[::-1], "descending": ascending[::-1]}
        matches = [name for name, answer in named.items() if answer == row["answer"]]
        assert matches
        return matches[0] if len(matches) == 1 else "ambiguous"

    share = {name: count / 20_000 for name, count in Counter(map(procedure, demonstrations(20_000))).items()}
    assert 0.37 < share["right"] < 0.42
    assert all(0.17 < share[name] < 0.21 for name in ("copy", "reverse", "descending"))


def test_demonstrations_never_show_a_held_out_prompt():
    for share in (0.1, 0.5):
        options = {"size": 3000, "holdout": share}
        shown = load_prompts(DEMONSTRATIONS.model_copy(update={"options": options}), seed=3)
        assert split_holdout(shown, share)[1] == []
    _, heldout = split_holdout(load_prompts(PROMPTS, seed=0), 0.1)
    assert 400 < len(heldout) < 600


def test_the_run_seed_reaches_the_functions():
    first = [load_prompts(PROMPTS, seed=seed)[0].messages for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]
    fixed = PROMPTS.model_copy(update={"options": {"size": 10, "seed": 5}})
    assert load_prompts(fixed, seed=0).prompt_ids == load_prompts(fixed, seed=1).prompt_ids

"""Prompts that are there twice, or both trained on and evaluated."""

from __future__ import annotations

import json
from pathlib import Path

from forge_core.config import load_config
from forge_core.data import load_prompts
from forge_core.data.duplicates import find_duplicates, normalised
from forge_core.data.prompts import Prompt, prompt_id
from forge_core.runs.prompt_checks import prompt_warnings, trained_and_evaluated


def prompts(*texts: str, targets: str = "") -> list[Prompt]:
    found = []
    for row, text in enumerate(texts):
        messages = [{"role": "user", "content": text}]
        found.append(Prompt(row, prompt_id(messages), messages, targets[row : row + 1] or "a", "t"))
    return found


def test_a_set_without_duplicates_reports_nothing():
    assert find_duplicates(prompts("a", "b", "c"), prompts("d")).lines() == []


def test_repeats_conflicts_and_near_repeats_are_told_apart():
    report = find_duplicates(prompts("Add 1.", "Sort 2", "Add 1.", "add  1", "Sort 2", targets="aabaa"))
    assert report.conflicting == [(0, 2)]
    assert report.near == [(0, 3)]
    assert report.repeated == [(1, 4)]
    assert report.lines()[0] == "dataset.path: 1 rows repeat an earlier prompt with another answer (rows 0 and 2)"
    assert len(report.lines()) == 3


def test_evaluated_prompts_that_are_trained_on_are_reported_exact_or_near():
    report = find_duplicates(prompts("What is 2?", "b"), prompts("b", "WHAT is 2", "c"))
    assert report.across == [(1, 0)]
    assert report.nearly_across == [(0, 1)]


def test_what_differs_in_meaning_is_no_near_duplicate():
    texts = ("1 2", "12", "3.5", "35", "2+2", "2-2", r"\frac{1}{23}", r"\frac{12}{3}", "x", "(x)")
    assert len({normalised(prompt) for prompt in prompts(*texts)}) == len(texts)


def write(file: Path, texts: list[str]) -> None:
    file.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))


def test_a_run_says_at_its_start_what_is_repeated_and_what_of_its_evaluation_it_trains_on(tmp_path: Path):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", ["a", "b", "a", "c"])
    write(folder / "test.jsonl", ["c", "d"])
    config = load_config({"dataset": {"path": str(folder)}, "eval": {"split": "test"}})
    loaded = load_prompts(config.dataset, seed=0)
    assert prompt_warnings(config, loaded) == [
        "dataset.path: 1 rows repeat an earlier prompt: forge data CONFIG lists them",
        "dataset.path: 1 prompts of eval.split=test are trained on too: forge data CONFIG lists them",
    ]
    assert find_duplicates(*trained_and_evaluated(config, loaded)).across == [(3, 0)]


def test_a_run_says_at_its_start_how_many_prompts_have_no_answer(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text(
        '{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n{"prompt": "c", "answer": ""}\n'
    )
    given = {"dataset": {"path": str(tmp_path / "x.jsonl")}, "rewards": {"functions": [{"path": "math"}]}}
    said = "dataset.path: 2 of 3 rows have no answer, so no response to them can be right"
    for rewards, expected in (("math", [said]), ("format", [])):
        config = load_config({**given, "rewards": {"functions": [{"path": rewards}]}})
        assert prompt_warnings(config, load_prompts(config.dataset, seed=0)) == expected
    asked, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": "1"}
    (tmp_path / "x.jsonl").write_text(
        json.dumps({"messages": [asked, reply]}) + "\n" + json.dumps({"messages": [asked]})
    )
    told = load_prompts(load_config(given).dataset, seed=0, needs_answer=True)
    assert [p.target for p in told] == ["1", None]
    assert "1 of 2 rows have no answer" in prompt_warnings(load_config(given), told)[0]


def test_exact_repeats_never_lie_on_both_sides_of_a_hash_split_and_near_ones_are_reported(tmp_path: Path):
    texts = [f"question {i % 40}" for i in range(80)] + [f"Question {i}!" for i in range(40)]
    write(tmp_path / "x.jsonl", texts)
    config = load_config({"dataset": {"path": str(tmp_path / "x.jsonl")}, "eval": {"holdout": 0.5}})
    report = find_duplicates(*trained_and_evaluated(config, load_prompts(config.dataset, seed=0)))
    assert report.across == []
    assert len(report.repeated) + len(report.conflicting) > 5
    assert report.nearly_across

"""The known data sets, from small files in their exact schema."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_core.config.data_sections import DatasetSection
from forge_core.data import load_prompts
from forge_core.data.layouts import last_boxed

GSM8K = pa.table(
    {
        "question": ["Natalia sold 48 clips in April and half as many in May. How many in all?", "How much is it?"],
        "answer": [
            "She sold 48/2 = <<48/2=24>>24 in May.\nIn all 48+24 = <<48+24=72>>72.\n#### 72",
            "Big.\n#### 1,080",
        ],
    }
)
MATH_500 = pa.table(
    {
        "problem": ["Convert the point $(0,3)$ to polar coordinates."],
        "solution": [r"We have $r = 3$. The answer is $\boxed{\left( 3, \frac{\pi}{2} \right)}.$"],
        "answer": [r"\left( 3, \frac{\pi}{2} \right)"],
        "subject": ["Precalculus"],
        "level": pa.array([2], pa.int64()),
        "unique_id": ["test/precalculus/807.json"],
    }
)
HENDRYCKS_MATH = pa.table(
    {
        "problem": ["How many vertical asymptotes does the graph have?"],
        "level": ["Level 3"],
        "type": ["Algebra"],
        "solution": [r"First \boxed{1}, no: there are $\boxed{\frac{2}{1}}$ of them."],
    }
)
DAPO = pa.table(
    {
        "data_source": ["math_dapo"],
        "prompt": [[{"content": "Solve it. The last line is Answer: $Answer.\n\nFind a+b.", "role": "user"}]],
        "ability": ["MATH"],
        "reward_model": [{"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}],
        "extra_info": [{"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"}],
    }
)


def load(tmp_path: Path, table: pa.Table, **fields):
    pq.write_table(table, tmp_path / "set.parquet")
    return load_prompts(DatasetSection(path=str(tmp_path / "set.parquet"), **fields), seed=0, needs_answer=True)


def test_gsm8k_targets_are_what_follows_the_hashes(tmp_path: Path):
    prompts = load(tmp_path, GSM8K)
    assert [p.target for p in prompts] == ["72", "1,080"]
    assert prompts[0].messages == [{"role": "user", "content": GSM8K["question"][0].as_py()}]
    assert prompts[0].metadata == {"solution": GSM8K["answer"][0].as_py()}


def test_gsm8k_targets_are_the_same_when_its_columns_are_named(tmp_path: Path):
    prompts = load(tmp_path, GSM8K, prompt_column="question", answer_column="answer")
    assert [p.target for p in prompts] == ["72", "1,080"]


def test_math_500_uses_its_final_answers(tmp_path: Path):
    prompt = load(tmp_path, MATH_500)[0]
    assert prompt.target == r"\left( 3, \frac{\pi}{2} \right)"
    assert prompt.metadata["subject"] == "Precalculus"
    assert prompt.metadata["solution"].startswith("We have")


def test_hendrycks_math_targets_are_the_last_boxed_content(tmp_path: Path):
    prompt = load(tmp_path, HENDRYCKS_MATH)[0]
    assert prompt.target == r"\frac{2}{1}"
    assert prompt.metadata["solution"] == HENDRYCKS_MATH["solution"][0].as_py()
    assert prompt.metadata["level"] == "Level 3"


def test_dapo_prompts_are_messages_with_the_ground_truth_in_a_struct(tmp_path: Path):
    prompt = load(tmp_path, DAPO)[0]
    assert prompt.messages == [{"role": "user", "content": DAPO["prompt"][0].as_py()[0]["content"]}]
    assert prompt.target == "34"
    assert prompt.metadata["extra_info"] == {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"}
    assert prompt.metadata["data_source"] == "math_dapo"
    json.dumps(prompt.metadata)


def test_a_dotted_answer_column_reaches_into_a_struct(tmp_path: Path):
    prompt = load(tmp_path, DAPO, answer_column="extra_info.index")[0]
    assert prompt.target == "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"


def test_plain_question_and_answer_columns_are_left_as_they_are(tmp_path: Path):
    prompt = load(tmp_path, pa.table({"question": ["2+2?"], "answer": ["4"]}))[0]
    assert prompt.target == "4"
    assert prompt.metadata == {}


@pytest.mark.parametrize(
    ("columns", "prompt", "target"),
    [
        ({"prompt": ["p"], "solution": ["s"]}, "p", "s"),
        ({"messages": [[{"role": "user", "content": "p"}]], "target": ["t"]}, "p", "t"),
        ({"problem": ["p"], "target": ["t"]}, "p", "t"),
        ({"prompt": ["p"], "question": ["q"], "answer": [7]}, "p", "7"),
    ],
)
def test_usual_column_names_are_found_in_order(tmp_path: Path, columns: dict, prompt: str, target: str):
    found = load(tmp_path, pa.table(columns))[0]
    assert (found.messages[0]["content"], found.target) == (prompt, target)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} then \boxed{\text{a{b}c}} end", r"\text{a{b}c}"),
        ("no box", "no box"),
        (r"\boxed{never closed", r"\boxed{never closed"),
        (r"\boxed{}", ""),
        (r"so the answer is $\boxed 5$, as $x=4$", "5"),
        (r"the answer is \fbox{$\frac{1}{2}$}.", r"$\frac{1}{2}$"),
        (r"\boxed {12} hours", "12"),
        (r"so \boxed{\left\{ x\right.} it is", r"\left\{ x\right."),
        (r"the set \boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"so $\boxed5$", "5"),
        (r"so $\boxed -3x.$", "-3x"),
        (r"so $\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        ("so \\boxed 5\nas $x=4$", "5"),
        (r"so \[\boxed 5\] as $x=4$", "5"),
        (r"\boxed{1} or \boxed{2}", "1, 2"),
    ],
)
def test_boxed_content_has_balanced_braces(text: str, content: str):
    assert last_boxed(text) == content

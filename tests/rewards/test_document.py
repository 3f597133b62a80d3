"""docs/rewards.md: its reward is used as it says, and its table lists what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from forge_core.config import load_config
from forge_core.rewards import BUILTINS, RewardActor
from forge_core.rewards.identity import check_rewards
from tests.docs.documents import ROOT, blocks, table_rows

DOCUMENT = ROOT / "docs" / "rewards.md"


@pytest.fixture
def reward_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source, _ = (block.text for block in blocks(DOCUMENT) if block.language == "python")
    (tmp_path / "my_reward.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my_reward.py"


def test_the_example_grades_as_the_document_says(reward_file: Path):
    _, example = (block.text for block in blocks(DOCUMENT) if block.language == "python")
    found: dict = {}
    exec(example, found)
    assert found["breakdown"] == {"Units": 1.0, "f1": pytest.approx(0.4)}
    assert found["mean"] == pytest.approx(0.7)
    assert found["reward"] == pytest.approx(1.04)


def test_the_first_configuration_grades(reward_file: Path):
    text = next(block.text for block in blocks(DOCUMENT) if block.language == "yaml")
    rewards = load_config(yaml.safe_load(text)).rewards
    check_rewards(rewards.functions)
    actor = RewardActor.from_config(rewards)
    try:
        metadata = {"answer": "12", "response_tokens": 1792}
        completion = "<think>It is 12 cm.</think><answer>12</answer>"
        assert actor.grade("How long?", completion, metadata) == pytest.approx(1 + 0.2 - 0.5 + 0.5)
    finally:
        actor.close()


def test_the_table_lists_every_built_in_reward():
    assert [row[0].strip("`") for row in table_rows(DOCUMENT, "name | reward")] == list(BUILTINS)


def test_every_built_in_reward_is_named_where_it_is_configured():
    reference = (ROOT / "docs" / "configuration.md").read_text()
    names = re.search(r"\| `rewards\.functions\.\*\.name` \| one of ([^|]*) \|", reference)
    assert names is not None
    assert set(names[1].split(", ")) == {"custom", *BUILTINS}

"""``forge new DIR``: a configuration, a reward of one's own and its test, which run as they are."""

from __future__ import annotations

import argparse

from flows.commands.models import new_folder

CONFIG = """\
# forge try config.yaml          roll out and grade a few prompts
# forge train config.yaml        train (about a minute on two CPU cores)
# pytest                         test the reward
# Every key with its default: forge config config.yaml
steps: 20
max_staleness: 1                 # generation may run one training step ahead; 0: strictly on-policy
model:                           # a small model made on the spot; or a folder or hub id: model: Qwen/Qwen3-0.6B
  architecture: qwen3
  vocabulary: "0123456789+=,:darst"
  max_position_embeddings: 32
warm_start:                      # a few supervised steps first; a pretrained model needs none
  steps: 150
  dataset: {path: "python://forge_core.data.sort_digits:demonstrations"}
dataset:                         # or a JSONL, Parquet or CSV file, a hub id, reasoning_gym://<task>
  path: python://forge_core.data.sort_digits:prompts
training:
  batch_size: 256                # episodes of a step: 32 prompts, 8 answers each
  learning_rate: 3.0e-4
  seq_len: 16
  token_budget: 4096
grpo: {n_samples: 8, beta: 0}
rollout: {max_new_tokens: 8}
rewards:
  functions:
    - path: my_reward.py:MyReward
eval: {interval: 10, prompts: 128}
"""

REWARD = '''\
"""A reward: any function or class with grade(prompt, completion, metadata) -> float.

metadata["answer"] is the ground truth; an exception makes the reward null, never 0.
"""


class MyReward:
    """Share of positions where the completion has the right character; 1.0 is a perfect answer."""

    def grade(self, prompt: str, completion: str, metadata: dict) -> float:
        answer = metadata["answer"]
        right = sum(a == b for a, b in zip(answer, completion.strip()))
        return right / max(len(answer), len(completion.strip()))
'''

TEST = """\
from my_reward import MyReward


def test_a_perfect_answer_earns_one():
    assert MyReward().grade("s:210=", "012", {"answer": "012"}) == 1.0


def test_each_wrong_character_costs_its_share():
    assert MyReward().grade("s:2100=", "0013", {"answer": "0012"}) == 0.75
    assert MyReward().grade("s:21=", "12345678", {"answer": "12"}) == 0.25
"""


def new(args: argparse.Namespace) -> int:
    """Write the three files."""
    folder = new_folder(args.directory)
    folder.mkdir(parents=True)
    for name, text in (("config.yaml", CONFIG), ("my_reward.py", REWARD), ("test_my_reward.py", TEST)):
        (folder / name).write_text(text)
    print(f"{folder}: config.yaml, my_reward.py and test_my_reward.py\n  cd {folder} && forge try config.yaml")
    return 0

"""What stored evaluations say: exact figures of made-up episodes."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path
from typing import Any

import pytest

from forge_core.data.prompts import Prompt
from forge_core.data_model import Completion, Episode, GenerationRequest, SamplingParams, VersionSpan
from forge_core.evaluation.plot import evaluation_png
from forge_core.evaluation.results import Evaluation, compare, read_evaluation, summarise
from forge_core.evaluation.suite import identity
from forge_core.evaluation.tables import comparison_line, markdown, table
from forge_core.rewards.actor import Graded
from forge_core.runs.episodes import (
    EPISODES_FILE,
    REWARDS_FILE,
    episode_of,
    episode_row,
    episodes_bytes,
    rewards_bytes,
)
from forge_core.store import Store, StoreError, open_store

Rewards = dict[int, list[float | None]]  # by prompt, a reward a sample


def row(prompt: int, sample: int, task: str = "sort", tokens: int = 4) -> dict[str, Any]:
    """A row of ``episodes``; more than four tokens are truncated."""
    request = GenerationRequest(f"e/{prompt:08d}/{sample:08d}", (1,), 0, SamplingParams())
    reason, spans = ("length" if tokens > 4 else "stop"), [VersionSpan(0, 0, tokens)]
    about = {"finish_reason": reason, "policy_version": 0, "version_spans": spans}
    asked = Prompt(prompt, f"id-{prompt}", [{"role": "user", "content": "p"}], "t", task)
    return episode_row(request, asked, Completion("p", "t", [5] * tokens, [-0.1] * tokens, about))


def episode(prompt: int, sample: int, reward: float | None, task: str = "sort", tokens: int = 4) -> Episode:
    return dataclasses.replace(episode_of(row(prompt, sample, task, tokens)), reward=reward)


def evaluation(rewards: Rewards, prefix: str = "evaluations/a/", **provenance: int) -> Evaluation:
    episodes = [episode(p, s, r) for p, values in rewards.items() for s, r in enumerate(values)]
    return Evaluation(prefix, episodes, dict(provenance))


def test_the_reward_is_the_mean_over_prompts_and_pass_at_k_counts_correct_samples():
    summary = summarise(evaluation({0: [1.0, 1.0, 0.0, 0.0], 1: [0.0, 0.0, 0.0, 0.0]}, asked=10))
    assert summary.reward.mean == 0.25
    assert (summary.reward.low, summary.reward.high, summary.reward.items) == (0.0, 0.5, 2)
    assert summary.passes == pytest.approx({1: 0.25, 2: (1 - 1 / 6) / 2, 4: 0.5})
    assert (summary.samples, summary.missing, summary.failed_grades) == (8, 2, 0)


def test_prompts_count_alike_however_many_of_their_samples_were_graded():
    summary = summarise(evaluation({0: [1.0, None, None], 1: [0.0, 0.0, 0.0]}))
    assert summary.reward.mean == 0.5
    assert summary.failed_grades == 2
    assert summary.passes == {1: 0.5}  # more than one sample of every prompt there is not


def test_length_and_truncation_are_those_of_all_samples():
    episodes = [episode(0, 0, 1.0, tokens=4), episode(1, 0, 1.0, tokens=10), episode(2, 0, None, tokens=1)]
    summary = summarise(Evaluation("evaluations/a/", episodes, {}))
    assert (summary.mean_tokens, summary.truncated) == (5.0, 1 / 3)


def test_tasks_have_figures_of_their_own_where_there_are_several():
    episodes = [episode(0, 0, 1.0, "sort"), episode(1, 0, 0.0, "add"), episode(2, 0, 0.5, "add")]
    summary = summarise(Evaluation("evaluations/a/", episodes, {}))
    assert {task: s.reward.mean for task, s in summary.tasks.items()} == {"add": 0.25, "sort": 1.0}
    assert summary.tasks["add"].reward.items == 2
    assert summarise(evaluation({0: [1.0]})).tasks == {}
    assert "x, add" in markdown(["x"], [summary], None)


def test_two_evaluations_are_compared_prompt_by_prompt():
    ours = evaluation({0: [1.0], 1: [0.5], 2: [0.0], 3: [1.0], 7: [1.0]}, "evaluations/a/")
    theirs = evaluation({0: [0.0], 1: [0.5], 2: [0.5], 3: [0.5], 8: [1.0]}, "evaluations/b/")
    found = compare(ours, theirs)
    assert found.gain.mean == pytest.approx(0.25)  # (1 + 0 - 0.5 + 0.5) / 4
    assert found.gain.items == 4
    assert (found.better, found.equal, found.worse) == (2, 1, 1)
    assert found.gain.low <= found.bound <= found.gain.mean
    assert "better on 2, equal on 1, worse on 1 prompts" in comparison_line(
        ["a", "b"], [summarise(ours), summarise(theirs)], found
    )
    assert compare(theirs, ours).gain.mean == pytest.approx(-0.25)
    assert found.p_value == compare(theirs, ours).p_value == 0.75  # of +-1, +-0.5, +-0.5: six of eight sums reach 1


def test_a_prompt_is_compared_with_itself_wherever_it_stands_and_a_repeated_one_with_its_repetition():
    """The set of one grew at the front; in both the prompt ``id-0`` is there twice, and prompts were left out."""
    other = lambda place, e: dataclasses.replace(e, episode_id=f"e/{place:08d}/{0:08d}")
    ours = [
        episode(0, 0, 1.0),
        other(1, episode(0, 0, 0.0)),
        other(2, episode(7, 0, 0.5)),
        other(3, episode(9, 0, 1.0)),
    ]
    theirs = [episode(5, 0, 1.0), *(other(place + 1, e) for place, e in enumerate(ours[:3]))]
    found = compare(Evaluation("a/", ours, {}), Evaluation("b/", theirs[::-1], {}))
    assert (found.gain.items, found.gain.mean, found.equal) == (3, 0.0, 3)


def test_the_bound_of_a_comparison_is_exact_where_every_prompt_gains_alike():
    found = compare(evaluation({p: [0.75] for p in range(9)}), evaluation({p: [0.5] for p in range(9)}))
    assert (found.gain.mean, found.gain.low, found.gain.high, found.bound) == (0.25, 0.25, 0.25, 0.25)


def test_evaluations_without_a_common_prompt_are_not_compared():
    with pytest.raises(StoreError, match=r"evaluations/a/ and evaluations/b/ have no prompt in common"):
        compare(evaluation({0: [1.0]}, "evaluations/a/"), evaluation({1: [1.0]}, "evaluations/b/"))


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def publish(store: Store, prefix: str, reward: float | None) -> None:
    graded = [Graded(reward, {}, "error" if reward is None else "ok")]
    rewards = rewards_bytes([episode(0, 0, reward)], graded)
    files = {EPISODES_FILE: episodes_bytes([row(0, 0)]), REWARDS_FILE: rewards}
    store.publish(prefix, files, request="asked", provenance={"asked": 3})


def test_a_stored_evaluation_is_read_back_with_its_rewards(store: Store):
    publish(store, "evaluations/a/", 0.75)
    found = read_evaluation(store, "evaluations/a/")
    assert [e.reward for e in found.episodes] == [0.75]
    assert summarise(found).missing == 2


def test_an_evaluation_in_which_nothing_was_graded_is_an_error(store: Store):
    publish(store, "evaluations/a/", None)
    with pytest.raises(StoreError, match="no graded sample"):
        read_evaluation(store, "evaluations/a/")


def test_the_identity_of_an_evaluation_is_all_that_decides_it_and_nothing_else():
    sampling = SamplingParams(max_new_tokens=4)
    ask = lambda name, seed=1: [GenerationRequest(f"{name}/{0:08d}/{0:08d}", (1, 2), seed, sampling)]
    prompt = Prompt(0, "id", [{"role": "user", "content": "p"}], "answer", "sort", {"difficulty": 1})
    grade = [{"name": "exact_match", "weight": 1.0, "options": {}, "source": "s"}]
    first = identity("weights", ask("a"), [prompt], grade, {})
    assert first == identity("weights", ask("another name"), [dataclasses.replace(prompt, row=7)], grade, {})
    others = [
        identity("others", ask("a"), [prompt], grade, {}),
        identity("weights", ask("a", seed=2), [prompt], grade, {}),
        identity("weights", ask("a"), [dataclasses.replace(prompt, target="another answer")], grade, {}),
        identity("weights", ask("a"), [dataclasses.replace(prompt, metadata={"difficulty": 2})], grade, {}),
        identity("weights", ask("a"), [dataclasses.replace(prompt, task="add")], grade, {}),
        identity("weights", ask("a"), [prompt], [{**grade[0], "source": "changed"}], {}),
        identity("weights", ask("a"), [prompt], grade, {"environment": {"source": "another"}}),
    ]
    assert len({first, *others}) == 8


def test_the_table_has_a_row_for_each_policy_and_task():
    summary = summarise(Evaluation("evaluations/a/", [episode(0, 0, 1.0, "sort"), episode(1, 0, 0.0, "add")], {}))
    lines = table(["a", "b"], [summary, summary])
    assert [line["policy"] for line in lines] == ["a", "a, add", "a, sort", "b", "b, add", "b, sort"]
    assert [line["reward"] for line in lines[:3]] == ["0.5000", "0.0000", "1.0000"]
    assert lines[0]["pass@k"] == "1: 0.500"


def test_the_picture_has_pass_at_k_beside_the_rewards_where_there_are_several_samples(tmp_path: Path):
    one = summarise(evaluation({0: [1.0], 1: [0.0]}))
    several = summarise(evaluation({0: [1.0, 0.0], 1: [0.0, 0.0]}))
    widths = []
    for name, summaries in {"one": [one], "two": [one, several]}.items():
        evaluation_png(["a", "b"][: len(summaries)], summaries, tmp_path / name)
        header = (tmp_path / name).read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        widths.append(int.from_bytes(header[16:20]))
    assert widths == [660, 1100]

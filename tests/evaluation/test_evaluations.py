"""Evaluations of real models: pinned, stored once for all who ask, refused before an engine loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.commands import INPUT_ERRORS
from forge_core.config import RunConfig, load_config
from forge_core.data import sort_digits
from forge_core.evaluation.asking import asked
from forge_core.evaluation.divergence import kl_divergence
from forge_core.evaluation.evaluating import evaluate_policy
from forge_core.evaluation.policies import Policy, find_policy, folder_policy
from forge_core.evaluation.results import read_evaluation, summarise
from forge_core.rewards.resolve import RewardError
from forge_core.runs.context import RunContext
from forge_core.stop import StopToken
from forge_core.store import Store
from forge_core.weights.host_cache import keep_published
from forge_core.weights.registry import Registry
from tests.retraining.records import record
from tests.runs import harness

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """A run of two steps: versions 0 and 2 are evaluated by the run itself."""
    store = f"file://{tmp_path_factory.mktemp('evaluations')}"
    ctx = harness.advance(harness.new_run(store, "steps=2", "eval.prompts=12"), 2)
    yield ctx
    while harness.OPENED:
        harness.OPENED.pop().close()


@pytest.fixture
def store(run: RunContext) -> Store:
    return run.store


def evaluated(run: RunContext, policy: Policy | str, **changes: Any) -> tuple[str, list[str]]:
    """The prefix of the evaluation, and what was said on the way."""
    policy = find_policy(run.store, policy) if isinstance(policy, str) else policy
    said: list[str] = []
    return evaluate_policy(run.store, load_config(run.config, changes), policy, StopToken(), said.append), said


def test_what_a_run_evaluated_is_taken_over_then_reused(run: RunContext):
    prefix, said = evaluated(run, "run://tiny/2")
    assert said == [f"run://tiny/2: evaluated by its run: {prefix}"]
    assert evaluated(run, "run://tiny") == (prefix, [f"run://tiny/2: evaluated before: {prefix}"])
    entry = run.ledger.entry(1)
    assert entry is not None
    assert summarise(read_evaluation(run.store, prefix)).reward.mean == pytest.approx(
        entry["metrics"]["eval/reward/mean"]
    )


def test_who_asks_again_waits_for_no_torch_no_transformers_and_no_prefect(run: RunContext):
    prefix, _ = evaluated(run, "run://tiny/2")
    words = ["eval", "run://tiny/2", "--store", run.store.uri]
    code = f"import sys; from flows.cli import main; print(main({words}), *sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert f"evaluated before: {prefix}" in found.stderr
    status, *modules = found.stdout.splitlines()[-1].split()
    assert status == "0"
    assert not {"torch", "transformers", "prefect", "vllm"} & set(modules)


def test_a_question_whose_evaluation_is_gone_is_asked_anew(run: RunContext):
    prefix, _ = evaluated(run, "run://tiny/2", **{"eval.prompts": 3})
    for key in run.store.list(prefix):
        run.store.delete(key)
    again, said = evaluated(run, "run://tiny/2", **{"eval.prompts": 3})
    assert (again, said) == (prefix, ["run://tiny/2: evaluating 3 responses to 3 prompts"])
    assert evaluated(run, "run://tiny/2", **{"eval.prompts": 3})[1] == [f"run://tiny/2: evaluated before: {prefix}"]


def test_a_version_that_its_run_did_not_evaluate_is_evaluated_with_exactly_its_weights(run: RunContext):
    one, said = evaluated(run, "run://tiny/1", **{"eval.samples": 4})
    assert said == ["run://tiny/1: evaluating 48 responses to 12 prompts"]
    found = read_evaluation(run.store, one)
    assert len({e.group_id for e in found.episodes}) == 12
    assert len({(e.prompt_id, tuple(e.response_ids)) for e in found.episodes}) > 12  # samples differ
    assert sorted(summarise(found).passes) == [1, 2, 4]
    assert found.provenance["tokens"] == sum(len(e.response_ids) for e in found.episodes)
    again = [e.response_ids for e in read_evaluation(run.store, evaluated(run, "run://tiny/1")[0]).episodes]
    first = [e.response_ids for e in found.episodes if e.sample_index == 0]
    assert again == first  # the same prompts and seeds, whatever the number of samples


def test_greedy_answers_of_a_prompt_are_one_answer(run: RunContext):
    prefix, _ = evaluated(run, "run://tiny/2", **{"eval.temperature": 0, "eval.samples": 3, "eval.prompts": 5})
    answers: dict[str, set[tuple[int, ...]]] = {}
    for episode in read_evaluation(run.store, prefix).episodes:
        answers.setdefault(episode.prompt_id, set()).add(tuple(episode.response_ids))
    assert [len(found) for found in answers.values()] == [1] * 5
    summary = summarise(read_evaluation(run.store, prefix))
    assert summary.passes[1] == summary.passes[3], "three times the same answer is no better than one"


def test_a_folder_with_the_same_files_is_the_same_model(run: RunContext, tmp_path: Path):
    here = tmp_path / "exported"
    shutil.copytree(keep_published(run.store, run.ledger.weights_prefix(2)), here, copy_function=shutil.copyfile)
    prefix, _ = evaluated(run, "run://tiny/2")
    assert evaluated(run, folder_policy("mine", here)) == (prefix, [f"mine: evaluated before: {prefix}"])
    (here / "config.json").write_text((here / "config.json").read_text() + "\n")
    assert folder_policy("mine", here).digest != find_policy(run.store, "run://tiny/2").digest


@pytest.mark.parametrize(
    "changes",
    [
        {"eval.temperature": 0.5},
        {"eval.samples": 2},
        {"eval.prompts": 11},
        {"run.seed": 9},
        {"rollout.max_new_tokens": 5},
        {"rewards.functions.0.weight": 2.0},
        {"rewards.functions.0.path": "tests.runs.rewards:constant"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_question_is_another_evaluation(run: RunContext, changes: dict[str, Any]):
    prefix, _ = evaluated(run, "run://tiny/2")
    other, said = evaluated(run, "run://tiny/2", **changes)
    assert other != prefix
    assert "evaluating" in said[0]


def test_other_answers_are_another_question_though_the_prompts_are_the_same(run: RunContext, tmp_path: Path):
    rows = sort_digits.prompts(size=40)
    told = []
    for answer in (None, None, "0"):
        changed = [row | ({"answer": answer} if answer else {}) for row in rows]
        (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        given = {"dataset": {"path": str(tmp_path / "x.jsonl")}, "eval.prompts": 3, "eval.holdout": 0.5}
        told += evaluated(run, "run://tiny/2", **given)[1]
    assert [line.split(": ")[1].split()[0] for line in told] == ["evaluating", "evaluated", "evaluating"]


def test_settings_that_do_not_decide_an_evaluation_do_not_repeat_it(run: RunContext):
    prefix, _ = evaluated(run, "run://tiny/2")
    assert evaluated(run, "run://tiny/2", **{"training.learning_rate": 1.0, "generator.max_batch": 3})[0] == prefix


def test_equal_weights_have_no_divergence_and_trained_ones_have(run: RunContext):
    folders = [keep_published(run.store, run.ledger.weights_prefix(version)) for version in (0, 2)]
    episodes = read_evaluation(run.store, evaluated(run, "run://tiny/2")[0]).episodes
    assert kl_divergence(run.config, folders[1], folders[1], episodes, StopToken()) == 0.0
    assert kl_divergence(run.config, folders[1], folders[0], episodes, StopToken()) > 0.0


def test_too_many_failed_grades_are_an_error_and_nothing_is_stored(run: RunContext):
    before = run.store.list("evaluations")
    with pytest.raises(RewardError, match=r"evaluations/.*: 12 of 12 grades failed.*the verifier is down"):
        evaluated(run, "run://tiny/2", **{"rewards.functions.0.path": "tests.runs.rewards:broken"})
    assert run.store.list("evaluations") == before


def test_a_registered_model_is_the_version_that_its_alias_names(run: RunContext):
    manifest = run.store.open_published(run.ledger.weights_prefix(2)).manifest
    pinned = record("tiny", 2, weights=manifest.prefix, weights_digest=manifest.content)
    Registry(run.store, "digits").promote(pinned, "by a test")
    policy, version = find_policy(run.store, "model://digits"), find_policy(run.store, "run://tiny/2")
    assert (policy.digest, policy.version) == (version.digest, version.version)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("run://tiny/9", "run 'tiny' in .* has the versions 0 to 2"),
        ("run://nobody/0", "run 'nobody' in .* has no version"),
        ("run://tiny/x", "write run://RUN_ID/VERSION"),
        ("tiny", "the store has a run of this name: write run://tiny"),
        ("model://nobody", "nobody has no production model"),
        ("model://digits/latest", "write model://NAME, model://NAME/production or model://NAME/candidate"),
        ("./nowhere", "no such folder"),
    ],
)
def test_a_model_that_is_not_there_is_named_with_what_would_work(store: Store, model: str, said: str):
    with pytest.raises(INPUT_ERRORS, match=said):
        find_policy(store, model)


def test_a_folder_needs_a_configuration_and_prompts_are_needed_at_all(run: RunContext, tmp_path: Path):
    here = tmp_path / "exported"
    shutil.copytree(keep_published(run.store, run.ledger.weights_prefix(2)), here, copy_function=shutil.copyfile)
    with pytest.raises(INPUT_ERRORS, match="does not say what it is to be evaluated on"):
        asked(str(here), None, {}, run.store.uri, None)
    with pytest.raises(INPUT_ERRORS, match=r"eval\.prompts: is 0"):
        evaluated(run, "run://tiny/2", **{"eval.prompts": 0})


def test_a_runs_own_configuration_is_taken_where_none_is_given(run: RunContext):
    question = asked("run://tiny/2", None, ["eval.prompts=5"], run.store.uri, "run://tiny/0")
    assert isinstance(question.config, RunConfig)
    assert question.config.eval.prompts == 5
    assert question.config.rewards == run.config.rewards
    assert [p.name for p in question.policies] == ["run://tiny/2", "run://tiny/0"]


def test_a_run_starts_from_a_version_of_another_run(run: RunContext):
    child = harness.new_run(run.store, "run.id=child", "model=run://tiny/2", f"store={run.store.uri}", "steps=1")
    harness.advance(child, 1)
    digests = [policy.digest for policy in (find_policy(run.store, n) for n in ("run://child/0", "run://tiny/2"))]
    assert digests[0] == digests[1]

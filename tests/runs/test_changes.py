"""What may change when a run is resumed, and what open batches do not survive."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.config import ConfigError, RunConfig, validate_for_training
from forge_core.rewards import RewardError
from forge_core.runs.context import RunContext
from forge_core.runs.episodes import add_rewards, read_episodes
from forge_core.runs.open_batches import check_open, withdraw
from forge_core.runs.record import load_run, resume_run
from forge_core.runs.stages import reference_shard, sample_shard, score_shard
from forge_core.runs.training import train_batch
from forge_core.store import CorruptObject, layout
from tests.runs.harness import advance, make_batch, memory, new_run, opened, reopened, tiny

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("key", "value"), [("rollout.shards", "4"), ("grpo.temperature", "0.5"), ("filters.truncated", "mask")]
)
def test_a_change_that_open_batches_do_not_survive_names_the_way_out(key: str, value: str) -> None:
    ctx = advance(new_run(memory(), "max_staleness=1"), 1)
    make_batch(ctx, 1)  # planned, sampled and graded, but not trained
    with pytest.raises(ConfigError, match=r"batches 1 to 1 are planned.*forge resume tiny steps=2"):
        resume_run(ctx.store, ctx.record, tiny("max_staleness=1", f"{key}={value}"), [key])
    train_batch(ctx, 1)
    record = resume_run(ctx.store, ctx.record, tiny("max_staleness=1", f"{key}={value}"), [key])
    assert record.changes == 1


def goes_on(ctx: RunContext, config: RunConfig, *keys: str, code: bool = False) -> RunContext:
    """The run as ``forge resume`` goes on with it."""
    again = opened(RunContext(ctx.store, resume_run(ctx.store, load_run(ctx.store, ctx.run_id), config, keys, code)))
    again.rollouts.begin(max(0, again.ledger.head()))
    return again


def manifests(ctx: RunContext, kind: str) -> list[str]:
    return [key for key in ctx.store.list(f"runs/tiny/{kind}") if key.endswith("manifest.json")]


def test_open_batches_are_graded_again_by_changed_rewards_and_nothing_is_sampled_again() -> None:
    asked = ("max_staleness=1", "grpo.beta=0.1")
    ctx = advance(new_run(memory(), *asked), 1)
    make_batch(ctx, 1)
    before = {kind: manifests(ctx, kind) for kind in ("episodes", "rewards", "reference")}
    again = goes_on(ctx, tiny(*asked, "rewards.functions.0.weight=2"), "rewards")
    committed = {kind: [key for key in keys if "/00000000/" in key] for kind, keys in before.items()}
    assert manifests(again, "episodes") == before["episodes"]
    for kind in ("rewards", "reference"):
        assert manifests(again, kind) == committed[kind] != before[kind]
    make_batch(again, 1)
    train_batch(again, 1)
    (prefix, *_) = again.ledger.entry(1)["shards"]["rewards"]
    graded = read_episodes(again.store, prefix.replace("/rewards/", "/episodes/"))
    add_rewards(again.store, prefix, graded)
    assert any(e.reward for e in graded)
    assert [e.reward for e in graded] == [2 * e.components["first_digit"] for e in graded]


def test_a_reward_that_raised_is_mended_and_its_batch_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CODE_PATH", str(tmp_path))
    (tmp_path / "mine.py").write_text("def grade(prompt, completion, metadata):\n    return 1 / 0\n")
    path = f"rewards.functions=[{{path: '{tmp_path}/mine.py:grade'}}]"
    ctx = new_run(memory(), path, "eval.prompts=0")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        advance(ctx, 1)
    (tmp_path / "mine.py").write_text("def grade(prompt, completion, metadata):\n    return len(completion) / 9\n")
    advance(goes_on(ctx, tiny(path, "eval.prompts=0"), code=True), 1)


@pytest.mark.parametrize("key", ["rewards.timeout_s", "rewards.max_error_share"])
def test_what_decides_no_grade_leaves_the_grades(key: str) -> None:
    ctx = advance(new_run(memory(), "max_staleness=1"), 1)
    make_batch(ctx, 1)
    before = manifests(ctx, "rewards")
    goes_on(ctx, tiny("max_staleness=1", f"{key}=0.9"), "rewards")
    assert manifests(ctx, "rewards") == before


def test_a_smaller_staleness_than_open_batches_have_is_refused_with_the_one_that_works() -> None:
    ctx = advance(new_run(memory(), "max_staleness=2", "eval.prompts=0"), 1)
    make_batch(ctx, 1)
    make_batch(ctx, 2)  # by version 0
    with pytest.raises(
        ConfigError, match=r"batch 2 was sampled by version 0 already: max_staleness=2 or more.*steps=3"
    ):
        goes_on(ctx, tiny("max_staleness=1", "eval.prompts=0"), "max_staleness")
    train_batch(ctx, 1)
    train_batch(ctx, 2)
    goes_on(ctx, tiny("max_staleness=1", "eval.prompts=0"), "max_staleness")


def test_changed_code_that_open_batches_were_planned_with_is_named_as_such() -> None:
    store = new_run(memory()).store
    store.put_new_json(layout.plan("tiny", 0, 0), {"shards": []})
    with pytest.raises(ConfigError, match="with the code that the run started with, finish them first"):
        check_open(store, "tiny", ["dataset python://mine:prompts"], tiny())


def test_another_teacher_compares_open_batches_again() -> None:
    ctx = advance(new_run(memory(), "max_staleness=1", "grpo.beta=0.1"), 1)
    make_batch(ctx, 1)
    graded, compared = manifests(ctx, "rewards"), manifests(ctx, "reference")
    withdraw(ctx.store, "tiny", ["loss.teacher"])
    assert manifests(ctx, "rewards") == graded
    assert manifests(ctx, "reference") == [key for key in compared if "/00000000/" in key]


def test_other_temperatures_are_other_reference_log_probabilities() -> None:
    ctx = advance(new_run(memory(), "grpo.beta=0.1"), 1)
    colder = tiny("grpo.beta=0.1", "grpo.temperature=0.5")
    again = reopened(ctx)
    again.config = colder
    with pytest.raises(Exception, match="another request"):
        reference_shard(again, sample_shard(reopened(ctx), 0, 0))


def test_a_run_of_one_step_records_its_evaluation_before_and_after() -> None:
    ctx = new_run(memory(), "steps=1")
    from forge_core.runs.initialise import initialise

    initialise(ctx)
    make_batch(ctx, 0)
    metrics = train_batch(ctx, 0)["metrics"]
    assert (metrics["eval/before/version"], metrics["eval/version"]) == (0, 1)
    assert metrics["eval/before/reward/mean"] != pytest.approx(metrics["eval/reward/mean"], abs=1e-12)
    assert metrics["eval/missing"] == 0


def test_weights_that_are_not_those_of_the_ledger_are_refused() -> None:
    ctx = advance(new_run(memory()), 1)
    again = reopened(ctx)
    real = again.ledger.entry
    again.ledger.entry = lambda b: (e := real(b)) and {**e, "weights_digest": "0" * 64}  # type: ignore[method-assign]
    with pytest.raises(CorruptObject, match="the ledger committed 000000000000"):
        again.weights_dir(1)


def test_refilling_what_an_estimator_learns_from_is_refused() -> None:
    config = tiny("filters.dynamic_sampling=true", "advantage.estimator=reinforce_plus_plus")
    with pytest.raises(ConfigError, match="reinforce_plus_plus_baseline"):
        validate_for_training(config, gpus=0)


def test_sampling_more_than_is_trained_on_needs_dynamic_sampling() -> None:
    with pytest.raises(ConfigError, match=r"filters\.oversample: is 2\.0.*set filters\.dynamic_sampling=true"):
        validate_for_training(tiny("filters.oversample=2"), gpus=0)
    with pytest.raises(ConfigError, match=r"filters\.adaptive: .*filters\.oversample to the most.*such as 4"):
        validate_for_training(tiny("filters.adaptive=true", "filters.dynamic_sampling=true"), gpus=0)


def test_grading_twice_gives_the_same_object() -> None:
    ctx = advance(new_run(memory()), 1)
    episodes = sample_shard(ctx, 0, 0)
    assert score_shard(ctx, episodes) == score_shard(reopened(ctx), episodes)


def test_a_resume_exactly_at_the_end_of_an_epoch_does_the_remaining_steps() -> None:
    sixteen = ("dataset.options.size=16", "eval.prompts=0")  # two batches of eight groups: an epoch ends at version 2
    ctx = advance(new_run(memory(), *sixteen), 2)
    assert ctx.plan(1)["cursor"]["after"] in ({"epoch": 1, "index": 0}, {"epoch": 0, "index": 16})
    again = advance(reopened(ctx), 4)
    assert again.ledger.head() == 4
    epochs = [[g["row"] for b in pair for g in again.plan(b)["groups"]] for pair in ((0, 1), (2, 3))]
    assert [sorted(rows) for rows in epochs] == [list(range(16))] * 2
    assert epochs[0] != epochs[1], "each epoch has an order of its own"


def test_a_batch_past_its_deadline_is_trained_with_what_there_is_and_not_waited_for() -> None:
    ctx = new_run(memory(), "eval.prompts=0", "rollout.deadline_s=0.000001", "steps=2")
    entry = advance(ctx, 1).ledger.entry(0)
    assert entry["episodes"] == {"planned": 32, "trained": 0, "dropped": {"deadline": 32}}
    assert entry["weights"] == ctx.ledger.weights_prefix(0)
    advance(reopened(ctx), 2)

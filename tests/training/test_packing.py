"""Packing: every document whole, once, in a bounded batch."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.training import policy
from forge_core.training.packing import (
    LOGPROBS,
    Sample,
    beginning,
    documents,
    full_of,
    pack,
    round_up,
    row_sizes,
    shapes,
)
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.trainer import TitanTrainer


def document(length: int, first: int = 1) -> Sample:
    tokens = list(range(first, first + length))
    logprobs = ([-factor * t for t in tokens] for factor in (1.0, 2.0, 3.0))
    return Sample(tokens, [True] * length, [0.5] * length, *logprobs, crossed=length % 3 == 0)


def read_back(batches: list, index: int) -> dict[str, list]:
    """The columns of document ``index``, in the order in which they lie in its row."""
    for batch in batches:
        here = batch.document_ids == index
        if here.any():
            rows = here.any(1).nonzero().flatten().tolist()
            assert len(rows) == 1, "a document must lie in one row"
            columns = here[rows[0]].nonzero().flatten()
            assert columns.tolist() == list(range(int(columns[0]), int(columns[-1]) + 1)), "and without gaps"
            columns_of = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
            return {name: None if column is None else column[here].tolist() for name, column in columns_of.items()}
    raise AssertionError(f"document {index} is missing")


@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(60, 300))
@settings(max_examples=60, deadline=None)
def test_every_document_lies_whole_in_one_row_of_a_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    given_samples = [document(length, first=10 * i + 1) for i, length in enumerate(lengths)]
    batches = pack(given_samples, budget, pad_id=0, seq_len=60)
    for index, sample in enumerate(given_samples):
        found = read_back(batches, index)
        assert found["input_ids"] == sample.tokens[:-1]
        assert found["target_ids"] == sample.tokens[1:]
        assert found["position_ids"] == list(range(len(sample.tokens) - 1))
        assert found["generator_logprobs"] == sample.generator_logprobs[1:]
        assert found["ref_logprobs"] == sample.ref_logprobs[1:]
        assert found["proximal_logprobs"] == sample.proximal_logprobs[1:]
        assert found["target_weights"] == sample.weights[1:]
        assert (found["crossed"] or [0.0] * (len(sample.tokens) - 1)) == [float(sample.crossed)] * (
            len(sample.tokens) - 1
        )
    positions = sum(int((batch.document_ids >= 0).sum()) for batch in batches)
    assert positions == sum(length - 1 for length in lengths)
    assert all(batch.input_ids.numel() <= budget for batch in batches)
    assert documents(batches) == len(lengths)


def test_padding_never_counts() -> None:
    [batch] = pack([document(9), document(5)], 100, pad_id=77, seq_len=60)
    padding = batch.document_ids < 0
    assert padding.any()
    assert batch.input_ids[padding].unique().tolist() == [77]
    assert batch.target_mask[padding].sum() == 0
    assert batch.target_weights[padding].sum() == 0


def test_the_first_token_never_counts_because_nothing_predicts_it() -> None:
    [batch] = pack([document(5)], 100, pad_id=0, seq_len=60)
    assert batch.target_mask.sum() == 4


def test_equal_short_documents_make_one_dense_batch_without_padding() -> None:
    [batch] = pack([document(14)] * 512, 16384, pad_id=0, seq_len=2048)
    assert batch.input_ids.shape == (512, 13)


def test_short_documents_share_rows_and_far_shorter_ones_get_their_own_batch() -> None:
    batches = pack([document(101), document(50), document(40), *[document(5)] * 20], 1000, pad_id=0, seq_len=200)
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(2, 104), (20, 4)]
    assert sorted(batches[0].document_ids[1].unique().tolist()) == [-1, 1, 2]


def test_few_shapes_and_little_padding_over_many_lengths() -> None:
    shapes = set()
    for longest in range(513, 1024):
        [batch] = pack([document(longest)], 16384, pad_id=0, seq_len=2048)
        shapes.add(tuple(batch.input_ids.shape))
        assert batch.input_ids.numel() <= 1.125 * (longest - 1)
    assert len(shapes) == 9


def test_equal_samples_give_equal_tensors() -> None:
    given_samples = [document(length) for length in (30, 7, 7, 19, 30)]
    first, second = (pack(given_samples, 64, pad_id=0, seq_len=60) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for field in dataclasses.fields(a):
            assert torch.equal(getattr(a, field.name), getattr(b, field.name))


def test_arrays_are_packed_like_lists() -> None:
    masked = dataclasses.replace(document(9), loss_mask=[False, True, False] * 3)
    lists = [document(30), document(7), masked, document(19)]
    arrays = [sample.in_arrays() for sample in lists]
    assert all(
        isinstance(getattr(arrays[2], name), np.ndarray) for name in ("tokens", "loss_mask", "weights", *LOGPROBS)
    )
    assert arrays[2].crossed
    for a, b in zip(*(pack(each, 64, pad_id=0, seq_len=60) for each in (lists, arrays)), strict=True):
        for field in dataclasses.fields(a):
            assert torch.equal(getattr(a, field.name), getattr(b, field.name)), field.name
    bare = Sample([1, 2, 3], [False, True, True], [0.0, 1.0, 1.0]).in_arrays()
    assert bare.generator_logprobs is None
    with pytest.raises(ValueError, match="one entry for each of its 9 tokens"):
        pack([dataclasses.replace(arrays[2], weights=np.ones(8, np.float32))], 64, pad_id=0, seq_len=60)


def test_log_probabilities_that_no_sample_has_are_left_out() -> None:
    [batch] = pack([Sample([1, 2, 3], [False, True, True], [0.0, 1.0, 1.0])], 8, pad_id=0, seq_len=4)
    assert batch.generator_logprobs is None
    assert batch.ref_logprobs is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([document(61)], "sample 0 has 61 tokens.*seq_len=60"),
        ([document(5), document(1)], "sample 1 has 1 tokens"),
        ([document(42)], "sample 0 has 42 tokens, more than token_budget=40"),
        ([dataclasses.replace(document(5), weights=[1.0])], "one entry for each of its 5 tokens"),
        (
            [document(5), dataclasses.replace(document(5), ref_logprobs=None)],
            "sample 1 and sample 0 differ.*ref_logprobs",
        ),
    ],
)
def test_samples_that_cannot_be_packed_are_refused_by_number(bad: list[Sample], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(bad, 40, pad_id=0, seq_len=60)


def test_nothing_packs_to_nothing() -> None:
    assert pack([], 100, pad_id=0, seq_len=10) == []


@given(st.integers(1, 10**6))
def test_round_up_adds_at_most_an_eighth(n: int) -> None:
    assert n <= round_up(n) <= n * 1.125


@pytest.mark.parametrize(
    ("options", "multiple"), [({"float8": True}, 16), ({"float8": True, "tensor_parallel": 3}, 48)]
)
@pytest.mark.parametrize("sizes", [0, 1, 4])
def test_rows_have_lengths_that_float8_takes(options: dict[str, Any], multiple: int, sizes: int) -> None:
    """Kernels refuse other numbers of positions in the backward pass."""
    settings = TrainerSettings(seq_len=61, token_budget=122, **options)
    trainer = TitanTrainer(Path("unused"), settings, SFTLoss())
    documents = [document(length) for length in (61, 60, 40, 33, 13, 2)]
    batches = pack(documents, 122, 0, 61, sizes=sizes)
    padded = [trainer._padded(batch) for batch in batches]
    lengths = [batch.input_ids.shape[1] for batch in padded]
    assert not any(length % multiple for length in lengths)
    assert [read_back(padded, i) for i in range(6)] == [read_back(batches, i) for i in range(6)]
    assert -(-round_up(60) // multiple) * multiple <= settings.row_positions, "a row of one document is one still"


def test_the_sizes_of_few_shapes_end_where_a_document_would_not_fit() -> None:
    assert row_sizes(1024, 100, 4) == [1024, 512, 256, 128]
    assert row_sizes(1024, 300, 4) == [1024, 512]
    assert row_sizes(1024, 100, 1) == [1024]
    assert row_sizes(64, 100, 4) == [64]  # a longer one is refused by name elsewhere
    assert row_sizes(1024, 100, 0) == []


@pytest.mark.parametrize(("budget", "seq_len", "sizes"), [(64, 16, 2), (64, 32, 2), (64, 64, 1), (60, 100, 1)])
def test_full_micro_batches_are_of_both_kinds_and_what_packing_makes_of_as_many_documents(
    budget: int, seq_len: int, sizes: int
) -> None:
    known = shapes(budget, seq_len, sizes)
    assert [shape.shared for shape in known] == [True, False] * sizes
    for shape in known:
        batch = full_of(document(seq_len), shape)
        assert batch.input_ids.shape == (shape.height, shape.row_len)
        prepared = policy.prepare(batch, torch.device("cpu"), torch.float32, longest=seq_len)
        assert (prepared.mask is not None) is shape.shared, "the kernels of the two are not the same"
        length = min(shape.row_len // (2 if shape.shared else 1) + 1, seq_len)
        given = [beginning(document(seq_len), length)] * documents([batch])
        (packed,) = pack(given, shape.height * shape.row_len, 0, seq_len, sizes=1)
        if packed.input_ids.shape == batch.input_ids.shape:
            columns = [(getattr(batch, f.name), getattr(packed, f.name)) for f in dataclasses.fields(batch)]
            assert all(ours is theirs is None or torch.equal(ours, theirs) for ours, theirs in columns)


def test_the_beginning_of_a_document_has_all_that_runs_along_it() -> None:
    whole, first = document(9), beginning(document(9), 4)
    assert (first.tokens, first.loss_mask, first.weights) == (whole.tokens[:4], whole.loss_mask[:4], whole.weights[:4])
    assert first.ref_logprobs == whole.ref_logprobs[:4]  # type: ignore[index]
    assert beginning(document(9), 20) == whole
    assert beginning(dataclasses.replace(whole, ref_logprobs=None), 4).ref_logprobs is None


@pytest.mark.parametrize(("budget", "seq_len", "sizes"), [(1024, 100, 4), (1024, 300, 4), (1024, 100, 1), (64, 64, 1)])
def test_packing_makes_no_shapes_but_those_that_are_known_ahead(budget: int, seq_len: int, sizes: int) -> None:
    known = {(shape.height, shape.row_len) for shape in shapes(budget, seq_len, sizes)}
    rng, met = random.Random(0), set()
    for count in (1, 2, 3, 5, 8, 20, 60):
        for longest in (3, seq_len // 4, seq_len):
            for lengths in ([longest] * count, [rng.randint(2, longest) for _ in range(count)]):
                batches = pack([document(length) for length in lengths], budget, 0, seq_len, sizes=sizes)
                met |= {tuple(batch.input_ids.shape) for batch in batches}
    assert met == known

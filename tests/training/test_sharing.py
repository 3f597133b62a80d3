"""Documents are divided among data-parallel ranks, and packed into few shapes for compiled code."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from forge_core.data_model import TextTrainBatch
from forge_core.training.packing import Sample, pack
from forge_core.training.sharing import share
from tests.training.tiny_models import samples

BUDGET, SEQ_LEN = 128, 64


def tokens_of(batches: list[TextTrainBatch]) -> dict[int, list[int]]:
    """Per document the input tokens, from every batch that holds it."""
    found: dict[int, list[int]] = {}
    for batch in batches:
        assert batch.document_ids is not None
        for document, token in zip(
            batch.document_ids.flatten().tolist(), batch.input_ids.flatten().tolist(), strict=True
        ):
            if document >= 0:
                found.setdefault(document, []).append(token)
    return found


@pytest.mark.parametrize("sizes", [0, 1, 4])
def test_one_rank_gets_what_pack_gives(sizes: int) -> None:
    given = samples(20)
    shared = share(given, BUDGET, 0, SEQ_LEN, 1, sizes=sizes)
    packed = pack(given, BUDGET, 0, SEQ_LEN, sizes=sizes)
    assert len(shared) == 1
    for ours, theirs in zip(shared[0], packed, strict=True):
        for field in dataclasses.fields(ours):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("sizes", [0, 1, 4])
@pytest.mark.parametrize(("count", "ranks"), [(20, 3), (7, 2), (2, 4)])
def test_every_document_goes_to_one_rank_and_ranks_take_equally_many_batches(
    sizes: int, count: int, ranks: int
) -> None:
    given = samples(count)
    shared = share(given, BUDGET, 0, SEQ_LEN, ranks, sizes=sizes)
    assert len(shared) == ranks
    assert len({len(own) for own in shared}) == 1
    found = [tokens_of(own) for own in shared]
    assert sorted(document for own in found for document in own) == list(range(count))
    for own in found:
        for document, tokens in own.items():
            assert tokens == given[document].tokens[:-1]


def test_an_empty_batch_counts_nothing_and_carries_every_column() -> None:
    (full,), (empty,) = share(samples(1), BUDGET, 0, SEQ_LEN, 2)
    assert float(empty.target_mask.sum()) == 0
    assert empty.document_ids is not None
    assert int(empty.document_ids.max()) == -1
    present = [[f.name for f in dataclasses.fields(b) if getattr(b, f.name) is not None] for b in (full, empty)]
    assert present[0] == present[1]


def test_ranks_get_nearly_the_same_number_of_tokens() -> None:
    given = samples(40)
    load = [sum(len(t) for t in tokens_of(own).values()) for own in share(given, BUDGET, 0, SEQ_LEN, 4)]
    assert max(load) - min(load) <= max(len(s.tokens) for s in given)


def test_packing_for_compiled_code_makes_one_shape_a_call_out_of_two() -> None:
    shapes = set()
    for seed in range(6):
        for longest in (12, 40, 60):
            found = {tuple(b.input_ids.shape) for b in pack(samples(17, longest, seed), BUDGET, 0, SEQ_LEN, sizes=1)}
            assert len(found) == 1
            shapes |= found
    assert shapes <= {(1, BUDGET), (BUDGET // SEQ_LEN, SEQ_LEN)}


def test_what_fits_in_a_part_of_the_budget_is_one_micro_batch_of_that_size() -> None:
    def size(tokens: int, sizes: int = 4) -> list[int]:
        zeros = [0.0] * 9
        given = [Sample([1] * 9, [False] + [True] * 8, zeros, zeros, zeros)] * (tokens // 8)
        return [batch.input_ids.numel() for batch in pack(given, 256, 0, 40, sizes=sizes)]

    assert [size(n) for n in (256, 136, 128, 72, 64, 16)] == [[256], [256], [128], [128], [64], [64]]
    assert size(264) == [256, 256]  # what is left over does not get a shape of its own
    assert [size(72, sizes) for sizes in (1, 2)] == [[256], [128]]
    assert [size(16, sizes) for sizes in (1, 2)] == [[240], [120]]  # one document a row of 40


def test_documents_as_long_as_a_row_need_no_mask() -> None:
    long = [dataclasses.replace(s) for s in samples(30, 64) if len(s.tokens) > BUDGET // 3]
    for batch in pack(long, BUDGET, 0, SEQ_LEN, sizes=1):
        assert batch.document_ids is not None
        assert batch.input_ids.shape == (BUDGET // SEQ_LEN, SEQ_LEN)
        assert all(len(row[row >= 0].unique()) <= 1 for row in batch.document_ids)

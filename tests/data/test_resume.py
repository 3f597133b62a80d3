"""A loader goes on exactly wherever it is interrupted, on any number of workers and ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.data import DataError
from forge_core.data.loader import build_loader
from forge_core.data.sft_settings import SftDataConfig
from tests.data.loaders import loader, section, text
from tests.data.tokenizers import tokenizer


@pytest.mark.engine
@settings(max_examples=15, deadline=None)
@given(
    streaming=st.booleans(),
    pack=st.booleans(),
    shuffle=st.booleans(),
    holdout=st.sampled_from([0.0, 0.3]),
    truncation=st.sampled_from(["right", "drop"]),
    stops=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    seq_len=st.sampled_from([24, 64, 150]),
)
def test_interrupted_then_resumed_equals_uninterrupted(
    files: Path,
    streaming: bool,
    pack: bool,
    shuffle: bool,
    holdout: float,
    truncation: str,
    stops: list[int],
    seed: int,
    seq_len: int,
):
    """Row for row, statistics too, over states that went through JSON, also twice at one place."""
    fields = {"pack": pack, "shuffle": shuffle, "holdout": holdout, "truncation": truncation}
    settings = section(files, streaming=streaming, **fields)
    whole = loader(settings, seed, seq_len)
    expected = [text(row) for row in islice(whole, sum(stops) + 10)]
    given: list[bytes] = []
    state = None
    for stop in [*stops, 10]:
        resumed = loader(settings, seed, seq_len)
        if state is not None:
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert resumed.state_dict() == state
        given += [text(row) for row in islice(resumed, stop)]
        state = resumed.state_dict()
    assert given == expected
    assert resumed.metrics() == whole.metrics()
    assert whole.state_dict() == state


def test_a_loader_may_go_back_and_forth_between_its_own_states(files: Path):
    one = loader(section(files, streaming=True))
    states, rows = [], []
    for _ in range(20):
        states.append(one.state_dict())
        rows.append(text(next(one)))
    for place in (13, 2, 19, 0):
        one.load_state_dict(states[place])
        assert text(next(one)) == rows[place]


@pytest.mark.engine
def test_workers_change_nothing_and_a_state_goes_from_one_number_of_them_to_another(files: Path):
    plain = loader(section(files))
    expected = [text(row) for row in islice(plain, 60)]
    working = loader(section(files, workers=2))
    given = [text(row) for row in islice(working, 31)]
    state = working.state_dict()
    working.close()
    alone = loader(section(files))
    alone.load_state_dict(state)
    given += [text(row) for row in islice(alone, 9)]
    again = loader(section(files, workers=1))
    again.load_state_dict(alone.state_dict())
    given += [text(row) for row in islice(again, 20)]
    again.close()
    assert given == expected
    assert again.metrics() == plain.metrics()


PARENT = """
import sys, time
from forge_core.data.encoding import Encoder
from forge_core.data.encoding_pool import encoding_pool
from tests.data.tokenizers import tokenizer
if __name__ == "__main__":
    pool = encoding_pool(Encoder(tokenizer(), 10), 2)
    pool.submit([])(), pool.submit([])()
    print(*pool._pool._processes, flush=True)
    time.sleep(600)
"""


@pytest.mark.engine
def test_workers_do_not_outlive_a_parent_that_was_killed(tmp_path: Path):
    (tmp_path / "parent.py").write_text(PARENT)
    root = Path(__file__).parents[2]
    command = [sys.executable, str(tmp_path / "parent.py")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)})
    assert parent.stdout is not None
    workers = [Path("/proc") / pid for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert workers
    deadline = time.monotonic() + 10
    while any(worker.exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.engine
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2)])
def test_ranks_share_every_global_batch_and_their_number_may_change_on_resume(files: Path, before: int, after: int):
    from forge_core.training.packed_rows import PackedRows

    def taken(source: Any, ranks: int) -> list[list[int]]:
        """The rows of one global batch, as all ranks have them in their micro-batches."""
        rows = PackedRows.of(list(islice(source, 8)))
        each = [int((rows.document_ids == document).sum()) for document in range(len(rows))]
        assert rows.lengths == each
        shares = [list(rows.micro_batches(rank, ranks, 128)) for rank in range(ranks)]
        assert {sum(len(batch.input_ids) for batch in share) for share in shares} == {8 // ranks}
        return sorted(row.tolist() for share in shares for batch in share for row in batch.input_ids)

    one, first, second = (loader(section(files)) for _ in range(3))
    expected = [sorted(row.input_ids.tolist() for row in islice(one, 8)) for _ in range(4)]
    found = [taken(first, before) for _ in range(2)]
    second.load_state_dict(first.state_dict())
    assert found + [taken(second, after) for _ in range(2)] == expected


@pytest.mark.engine
def test_fewer_documents_than_ranks_are_shared_too_and_padding_counts_nowhere(tmp_path: Path):
    from forge_core.data.loader import finite_rows
    from forge_core.training.packed_rows import PackedRows

    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    settings = SftDataConfig(path=str(tmp_path / "one.jsonl"), pack=False)
    trained = PackedRows.of(list(islice(loader(settings), 8)))
    assert [sum(len(b.input_ids) for b in trained.micro_batches(r, 8, 64)) for r in range(8)] == [1] * 8
    validated = PackedRows.of(list(finite_rows(settings, tokenizer(), 64))).filled(8)
    targets = [float(sum(b.target_mask.sum() for b in validated.micro_batches(r, 8, 64))) for r in range(8)]
    assert targets == [validated.totals.tokens, *[0.0] * 7]
    assert validated.totals.tokens > 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"packing_window": 4}, "settings inner\\+long_train: packing_window"),
        ({"masking": "all"}, "settings .*: masking"),
        ({"streaming": True}, "settings short_train: streaming"),
    ],
)
def test_a_state_of_other_settings_is_refused_by_name(files: Path, change: dict, named: str):
    state = loader(section(files)).state_dict()
    with pytest.raises(
        DataError, match=rf"dataset: the stored position belongs to other rows; these differ: .*{named}"
    ):
        loader(section(files, **change)).load_state_dict(state)


def test_a_state_of_another_seed_length_tokenizer_or_of_changed_data_is_refused(files: Path, tmp_path: Path):
    data = tmp_path / "x.jsonl"
    data.write_text('{"text": "a"}\n{"text": "b"}\n')
    settings = SftDataConfig(path=str(data))
    state = loader(settings).state_dict()
    for other, named in (
        (loader(settings, seed=1), "seed"),
        (loader(settings, seq_len=32), "seq_len"),
        (build_loader(settings, tokenizer(), 64, seed=0), "tokenizer"),
    ):
        with pytest.raises(DataError, match=f"these differ: {named}\\."):
            other.load_state_dict(state)
    data.write_text('{"text": "a"}\n{"text": "c"}\n')
    with pytest.raises(DataError, match=r"these differ: data x_train\."):
        loader(settings).load_state_dict(state)
    with pytest.raises(DataError, match="is none of a loader"):
        loader(settings).load_state_dict({"epoch": 1})


def test_a_state_holds_when_the_files_move_and_no_token_is_in_it(files: Path, tmp_path: Path):
    (tmp_path / "short.jsonl").write_bytes((files / "short.jsonl").read_bytes())
    here, there = (loader(SftDataConfig(path=str(folder / "short.jsonl"))) for folder in (files, tmp_path))
    next(here)
    state = here.state_dict()
    there.load_state_dict(state)
    assert text(next(there)) == text(next(here))
    assert len(json.dumps(state)) < 2000

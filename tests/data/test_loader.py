"""Endless rows: one global order, resumed exactly wherever it is interrupted."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.data import DataError
from forge_core.data.loader import PackedRow, build_loader, check_sft_data, finite_rows
from forge_core.data.sft_settings import SftDataConfig
from forge_core.data.sft_sources import open_documents
from tests.data.tokenizers import CHATML, tokenizer


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    """Two sets of questions, one of texts in three Parquet files, and one whose replies are long."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stem, rows, longest in (("short", 90, 12), ("long", 35, 60)):
            made = [{"prompt": f"{stem} {i}", "completion": "ab " * draw.randint(1, longest)} for i in range(rows)]
            (folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        for part in range(3):
            texts = [f"text {part} {i} " + "c" * draw.randint(1, 40) for i in range(11 + part)]
            pq.write_table(pa.table({"text": texts}), folder / f"part{part}.parquet")
        yield folder


def section(files: Path, *, streaming: bool = False, **fields: Any) -> SftDataConfig:
    """A mixture within a mixture."""
    texts = {"path": str(files / "part*.parquet"), "streaming": streaming, "label": "texts", "weight": 3}
    inner = {"label": "inner", "mixture": [{"path": str(files / "short.jsonl"), "streaming": streaming}, texts]}
    outer = [{"path": str(files / "long.jsonl"), "weight": 0.5}, inner]
    return SftDataConfig(mixture=outer, **{"packing_window": 3, "shuffle_buffer": 7, **fields})


def loader(section: SftDataConfig, seed: int = 0, seq_len: int = 64) -> Any:
    return build_loader(section, tokenizer(CHATML), seq_len, seed=seed)


def text(row: PackedRow) -> bytes:
    return b"".join(array.tobytes() for array in vars(row).values())


def documents(rows: list[PackedRow]) -> list[str]:
    found = []
    for row in rows:
        for i in range(row.document_ids.max() + 1):
            own = row.document_ids == i
            found.append(tokenizer().decode([*row.input_ids[own], row.target_ids[own][-1]]))
    return found


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
        shares = [list(rows.micro_batches(rank, ranks, 128)) for rank in range(ranks)]
        assert {sum(len(batch.input_ids) for batch in share) for share in shares} == {8 // ranks}
        return sorted(row.tolist() for share in shares for batch in share for row in batch.input_ids)

    one, first, second = (loader(section(files)) for _ in range(3))
    expected = [sorted(row.input_ids.tolist() for row in islice(one, 8)) for _ in range(4)]
    found = [taken(first, before) for _ in range(2)]
    second.load_state_dict(first.state_dict())
    assert found + [taken(second, after) for _ in range(2)] == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_every_epoch_gives_every_document_once_in_a_new_order(files: Path, streaming: bool):
    settings = SftDataConfig(
        path=str(files / "part*.parquet"), streaming=streaming, pack=False, packing_window=1, shuffle_buffer=5
    )
    endless = loader(settings)
    epochs = [documents(list(islice(endless, 36))) for _ in range(3)]
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert len(set(epochs[0])) == 36
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("streaming", [False, True])
def test_size_uses_the_first_rows_only(files: Path, streaming: bool):
    settings = SftDataConfig(
        path=str(files / "part*.parquet"), streaming=streaming, size=13, pack=False, shuffle_buffer=5
    )
    rows = documents(list(islice(loader(settings), 26)))
    assert {one.split()[1] + one.split()[2] for one in rows[:13]} == {f"0{i}" for i in range(11)} | {"10", "11"}
    assert set(rows[13:]) == set(rows[:13])


def test_unshuffled_epochs_are_in_the_order_of_the_data(files: Path):
    settings = SftDataConfig(path=str(files / "part0.parquet"), pack=False, shuffle=False)
    rows = documents(list(islice(loader(settings), 22)))
    assert rows[:11] == rows[11:]
    assert [row.split()[2] for row in rows[:11]] == [str(i) for i in range(11)]


def test_epochs_and_lengths_are_counted(files: Path):
    one = loader(SftDataConfig(path=str(files / "part0.parquet"), pack=False, label="t"))
    rows = list(islice(one, 11))
    assert one.metrics()["dataset/t/num_epochs"] == 0
    rows += list(islice(one, 11))
    found = one.metrics()
    lengths = [int((row.document_ids == 0).sum()) + 1 for row in rows]
    assert found["dataset/t/num_epochs"] == 1
    assert found["dataset/t/samples_processed"] == 22
    assert found["dataset/t/tokens_processed"] == sum(lengths)
    assert (found["dataset/t/min_seq_len"], found["dataset/t/max_seq_len"]) == (min(lengths), max(lengths))
    assert found["packing/pct_of_tokens_padded"] == pytest.approx(100 * (1 - (sum(lengths) - 22) / (22 * 64)))


def test_mixtures_give_their_weights_nested_and_whatever_the_order_of_the_file(files: Path):
    one = loader(section(files, pack=False))
    for _ in range(1200):
        next(one)
    found = one.metrics()
    given = {name: found[f"dataset/{name}/samples_processed"] / 1200 for name in ("long_train", "short_train", "texts")}
    assert given == pytest.approx({"long_train": 1 / 3, "short_train": 1 / 6, "texts": 1 / 2}, abs=0.04)
    turned = section(files, pack=False)
    turned = turned.model_copy(update={"mixture": turned.mixture[::-1]})
    other = loader(turned)
    assert [text(row) for row in islice(other, 30)] == [
        text(row) for row in islice(loader(section(files, pack=False)), 30)
    ]


def test_seeds_differ_in_order(files: Path):
    first = [[text(row) for row in islice(loader(section(files), seed), 5)] for seed in (0, 1)]
    assert first[0] != first[1]


def test_held_out_documents_are_never_trained_on_and_all_of_them_validate(files: Path):
    settings = SftDataConfig(path=str(files / "short.jsonl"), holdout=0.3)
    trained = set(documents(list(islice(loader(settings), 200))))
    validated = documents(list(finite_rows(settings, tokenizer(CHATML), 64)))
    kept = documents(list(finite_rows(settings, tokenizer(CHATML), 64, side="train")))
    assert len(validated) == len(set(validated))
    assert trained == set(kept)
    assert not trained & set(validated)
    assert len(trained) + len(validated) == 90
    assert 15 < len(validated) < 40


def test_the_hold_out_is_that_of_a_grpo_run_on_the_same_prompts(files: Path):
    from forge_core.config.run_config import DatasetSection
    from forge_core.data import load_prompts, split_holdout

    prompts = load_prompts(DatasetSection(path=str(files / "short.jsonl")), seed=0)
    held = {prompts[row].messages[0]["content"] for row in split_holdout(prompts, 0.3)[1]}
    settings = SftDataConfig(path=str(files / "short.jsonl"), holdout=0.3)
    validated = documents(list(finite_rows(settings, tokenizer(CHATML), 64)))
    assert {one.split("user\n")[1].split("<|im_end|>")[0] for one in validated} == held


def test_validation_gives_each_document_of_a_mixture_once(files: Path):
    found = documents(list(finite_rows(section(files, streaming=True, truncation="left"), tokenizer(CHATML), 150)))
    assert len(found) == 90 + 36 + 35
    settings = SftDataConfig(path=str(files / "part0.parquet"), holdout=0.0001)
    with pytest.raises(DataError, match=r"dataset: no document is left for validation.*larger dataset\.holdout"):
        list(finite_rows(settings, tokenizer(), 64))


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


def test_documents_that_are_cut_or_left_out_are_counted_and_said_once(files: Path, caplog: pytest.LogCaptureFixture):
    settings = SftDataConfig(path=str(files / "long.jsonl"), truncation="drop", packing_window=2)
    with caplog.at_level(logging.WARNING):
        one = loader(settings)
        list(islice(one, 40))
    assert one.metrics()["dataset/long_train/too_long"] > 5
    assert one.metrics()["dataset/long_train/max_seq_len"] <= 65
    assert caplog.text.count("longer than 65 tokens and was left out (dataset.truncation=drop)") == 1


def test_a_set_without_a_usable_document_is_an_error_and_no_endless_loop(files: Path):
    settings = SftDataConfig(path=str(files / "long.jsonl"), truncation="drop")
    with pytest.raises(DataError, match=r"dataset: no document can be used: \d+ of long_train too_long"):
        next(loader(settings, seq_len=8))
    with pytest.raises(DataError, match=r"dataset\.holdout: every document of long_train is held out"):
        next(loader(SftDataConfig(path=str(files / "long.jsonl"), holdout=0.9999999)))


def test_an_error_in_a_row_names_the_row(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": ""}\n')
    with pytest.raises(DataError, match=r"dataset: row 1, completion: holds ''"):
        list(islice(loader(SftDataConfig(path=str(tmp_path / "x.jsonl"))), 2))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [("x.jsonl", '{"text": "a"}\n{"text": \n'), ("x.parquet", "no such thing"), ("x.jsonl", "")],
)
def test_a_file_that_cannot_be_read_is_named_whether_it_is_streamed_or_not(
    tmp_path: Path, name: str, content: str, streaming: bool
):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"dataset\.path: .*{name}"):
        list(islice(loader(SftDataConfig(path=str(tmp_path / name), streaming=streaming)), 2))


def test_a_stream_that_breaks_far_behind_its_beginning_says_where(tmp_path: Path):
    row = '{"text": "' + "a" * 2000 + '"}\n'
    (tmp_path / "x.jsonl").write_text(row * 12_000 + "{broken\n")  # in the third part that is parsed at once
    one = open_documents(SftDataConfig(path=str(tmp_path / "x.jsonl"), streaming=True), 0, "dataset")
    with pytest.raises(DataError, match=r"dataset\.path: x_train cannot be read behind row \d+ of its epoch"):
        [one.draw() for _ in range(12_001)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "none.jsonl"}, r"dataset\.path: there is no file or folder 'none.jsonl'"),
        ({"path": "none.jsonl", "streaming": True}, r"dataset\.path: there is no file or folder 'none.jsonl'"),
        ({"path": "no*.jsonl", "streaming": True}, r"dataset\.path: no file matches"),
        ({"mixture": [{"path": "{files}/long.jsonl"}, {"path": "x.csv"}]}, r"dataset\.mixture\.1\.path: there is no"),
        ({"path": "{files}/long.jsonl", "format": "alpaca"}, r"dataset\.columns: the format alpaca needs instruction"),
        ({"path": "python://json:loads", "streaming": True}, r"dataset\.streaming: python://json:loads makes its rows"),
        ({"path": "python://json:nothing"}, r"dataset\.path: python://.*has no 'nothing'"),
    ],
)
def test_what_is_wrong_with_a_set_is_said_before_a_model_is_loaded(files: Path, fields: dict, message: str):
    written = json.loads(json.dumps(fields).replace("{files}", str(files)))
    with pytest.raises(DataError, match=message):
        check_sft_data(SftDataConfig(**written))


def test_sets_that_are_right_pass_the_check(files: Path):
    for streaming in (False, True):
        check_sft_data(section(files, streaming=streaming))
    check_sft_data(SftDataConfig(path="reasoning_gym://chain_sum", options={"size": 3}))


def test_the_targets_of_packed_rows_are_the_next_tokens(files: Path):
    row = next(loader(section(files)))
    real = row.document_ids >= 0
    inside = real[:-1] & (row.document_ids[:-1] == row.document_ids[1:])
    assert (row.target_ids[:-1][inside] == row.input_ids[1:][inside]).all()
    assert (np.diff(row.positions)[inside] == 1).all()
    assert real.mean() > 0.9

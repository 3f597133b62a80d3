"""Endless rows: one global order, every document in its turn."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from forge_core.data import DataError
from forge_core.data.loader import finite_rows
from forge_core.data.sft_settings import SftDataConfig
from tests.data.loaders import documents, loader, section, text
from tests.data.tokenizers import CHATML, tokenizer


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


def test_of_a_set_that_is_smaller_than_a_window_only_epochs_that_are_over_are_counted(files: Path):
    one = loader(SftDataConfig(path=str(files / "part0.parquet"), label="t"))  # 11 documents, 128 rows a window
    for _ in range(20):
        next(one)
        found = one.metrics()
        assert found["dataset/t/num_epochs"] <= found["dataset/t/samples_processed"] / 11
    list(islice(one, 300))
    assert one.metrics()["dataset/t/num_epochs"] > 10


def test_reading_rows_leaves_global_randomness_alone(files: Path):
    import random

    import torch

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()
    list(islice(loader(section(files)), 20))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()) == before


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


def test_sets_of_one_size_are_not_shuffled_alike(files: Path):
    path = str(files / "part0.parquet")
    orders = [documents(list(islice(loader(SftDataConfig(path=path, pack=False, label=n)), 11))) for n in ("a", "b")]
    assert orders[0] != orders[1]
    assert set(orders[0]) == set(orders[1])


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
    from forge_core.config.data_sections import DatasetSection
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


def test_documents_that_are_cut_or_left_out_are_counted_and_said_once(files: Path, caplog: pytest.LogCaptureFixture):
    settings = SftDataConfig(path=str(files / "long.jsonl"), truncation="drop", packing_window=2)
    with caplog.at_level(logging.WARNING):
        one = loader(settings)
        list(islice(one, 40))
    assert one.metrics()["dataset/long_train/too_long"] > 5
    assert one.metrics()["dataset/long_train/max_seq_len"] <= 65
    assert caplog.text.count("longer than 65 tokens and was left out (dataset.truncation=drop)") == 1


def test_the_targets_of_packed_rows_are_the_next_tokens(files: Path):
    row = next(loader(section(files)))
    real = row.document_ids >= 0
    inside = real[:-1] & (row.document_ids[:-1] == row.document_ids[1:])
    assert (row.target_ids[:-1][inside] == row.input_ids[1:][inside]).all()
    assert (np.diff(row.positions)[inside] == 1).all()
    assert real.mean() > 0.9

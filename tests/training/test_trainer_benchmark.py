"""The benchmark of the trainer checks what it times: on a CPU as on a GPU, with documents as a run has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bare_titan
from benchmarks.trainer_gpu import anchored, check, documents, saved_model, totals_of, trainer_of


@pytest.mark.engine
def test_its_check_finds_nothing_wrong_on_a_cpu(tmp_path: Path) -> None:
    found, wrong = check(saved_model("tiny", tmp_path, "cpu"), "cpu", compiled=False)
    assert wrong == []
    assert found["transformers"] < 1e-4


@pytest.mark.engine
def test_the_bare_loop_is_given_what_the_trainer_is(tmp_path: Path) -> None:
    folder = saved_model("tiny", tmp_path, "cpu")
    plain = documents([20, 12], 97, 0.3)
    arrays = anchored(plain, trainer_of(folder, "cpu", seq_len=32, token_budget=64))
    assert totals_of(arrays) == totals_of(plain)
    columns = bare_titan._columns(arrays, 40, torch.device("cpu"))
    for name, values in {"mask": "loss_mask", "weights": "weights", "generator": "generator_logprobs"}.items():
        expected = [value for sample in arrays for value in getattr(sample, values)[1:]]
        assert columns[name][0, : len(expected)].tolist() == pytest.approx([float(value) for value in expected])
        assert columns[name][0, len(expected) :].abs().sum() == 0

"""Supervised runs whose trainer is several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.runs.record import load_run, resume_run
from forge_core.runs.sft_context import SftContext
from forge_core.store import open_store
from tests.runs.test_rank_nodes import advance_with_the_other_node, on_two_nodes
from tests.sft.harness import advance, memory, new_run, opened, tiny

pytestmark = pytest.mark.engine
TWO = "parallelism.data_parallel_shard_degree=2"
SETTINGS = ("steps=2", "checkpoint.interval=1", "comm.init_timeout_s=100", "training.eps=1e-6")


def resumed(store: str, data: Path, *overrides: str) -> SftContext:
    """The run as another process with other parallel degrees would open it."""
    place = open_store(store)
    record = resume_run(place, load_run(place, "tiny-sft"), tiny(data, *overrides), ["parallelism"], True)
    return opened(SftContext(place, record))


def test_a_run_of_one_rank_goes_on_with_two_on_two_nodes_as_if_it_had_been_left_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two launchers on one machine that share nothing but a store: this process, and ``forge join``."""
    store = f"file://{tmp_path}/store"
    alone = advance(new_run(memory(), data, *SETTINGS), 2)
    advance(new_run(store, data, *SETTINGS), 1).close()
    on_two_nodes(monkeypatch)
    ctx = resumed(store, data, *SETTINGS, TWO)
    advance_with_the_other_node(ctx, store, lambda: advance(ctx, 2))
    for ours, theirs in zip(ctx.ledger.entries(), alone.ledger.entries(), strict=True):
        assert ours["cursor"] == theirs["cursor"], "the same rows"
        for metric in ("loss", "validation/loss", "grad_norm"):
            assert ours["metrics"][metric] == pytest.approx(theirs["metrics"][metric], rel=1e-4), metric


def test_one_rank_in_a_process_of_its_own_makes_the_same_run_bit_by_bit(data: Path, tmp_path: Path):
    inside = advance(new_run(memory(), data, *SETTINGS), 2)
    apart = advance(new_run(f"file://{tmp_path}/store", data, *SETTINGS, "training.own_process=true"), 2)
    assert apart.trainer._trainer.get_status()["ranks"] == 1
    for ours, theirs in zip(apart.ledger.entries(), inside.ledger.entries(), strict=True):
        assert ours["state_digest"] == theirs["state_digest"]
        assert ours["metrics"]["validation/loss"] == theirs["metrics"]["validation/loss"]

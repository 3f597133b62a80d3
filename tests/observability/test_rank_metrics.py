"""What code records on the ranks of a trainer, each a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_core.algorithms.ops import Totals
from forge_core.observability.metrics import collecting, drained
from forge_core.observability.reductions import reduce_metrics_states
from forge_core.store import folder_files, open_store
from forge_core.training.launch import RankOptions, Rendezvous
from forge_core.training.rank_group import RankGroup
from forge_core.training.settings import TrainerSettings
from forge_core.training.stored import TrainerSpec
from tests.observability.losses import RecordingLoss
from tests.training.tiny_models import samples, saved

pytestmark = pytest.mark.engine


def recording_loss() -> Any:
    return RecordingLoss(beta=0.0)


def test_values_of_all_ranks_arrive_with_the_step_by_rank_and_once(tmp_path: Path):
    store = open_store(str(tmp_path / "store"))
    store.publish("model/", folder_files(saved("qwen3-tied")[0]), request="model")
    settings = TrainerSettings(learning_rate=1e-2, seq_len=64, token_budget=128, data_parallel=2)
    group = RankGroup(
        TrainerSpec(store.uri, "model/", settings, recording_loss),
        2,
        loss=recording_loss(),
        logs=tmp_path / "logs",
        scratch="copy/",
        rendezvous=Rendezvous("test"),
        options=RankOptions(timeout_s=60.0, init_timeout_s=120.0),
    )
    drained()  # what other tests of this process recorded outside of any stage
    given = samples(16)
    tokens = sum(sum(sample.loss_mask[1:]) for sample in given)
    try:
        group.setup()
        for _ in range(2):
            with collecting() as collector:
                group.train_samples(given, totals=Totals(tokens, len(given)), temperature=1.0)
            states = drained(collector)
            (found,) = reduce_metrics_states(states.values())
            assert found.value == tokens
            assert states.keys() == {"0", "1"}
    finally:
        group.cleanup()

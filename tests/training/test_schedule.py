"""The learning rate of each optimizer step, and the settings a run gets."""

from __future__ import annotations

import pytest

from forge_core.config.run_config import RunConfig
from forge_core.training.optimizer import learning_rate
from forge_core.training.settings import TrainerSettings


def rates(steps: range, **settings: object) -> list[float]:
    return [learning_rate(step, TrainerSettings(learning_rate=1.0, **settings)) for step in steps]


def test_warm_up_rises_linearly_to_the_peak_and_stays() -> None:
    assert rates(range(6), warmup_steps=4, total_steps=100) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_the_floor_at_the_horizon_and_stays_there() -> None:
    found = rates(range(2, 14), warmup_steps=2, total_steps=12, lr_decay="linear", lr_min_ratio=0.5)
    assert found == pytest.approx([1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.5])


def test_cosine_decay_is_half_way_at_half_the_horizon() -> None:
    assert rates(range(0, 11, 5), total_steps=10, lr_decay="cosine", lr_min_ratio=0.1) == pytest.approx(
        [1.0, 0.55, 0.1]
    )


def test_a_warm_up_as_long_as_the_run_is_allowed() -> None:
    assert rates(range(3, 5), warmup_steps=4, total_steps=4, lr_decay="cosine")[-1] == 1.0


def test_the_horizon_counts_optimizer_steps_of_the_whole_run() -> None:
    config = RunConfig.model_validate({"steps": 10, "training": {"sync_interval": 2, "epochs_per_batch": 3}})
    assert TrainerSettings.from_config(config).total_steps == 60


def test_the_degrees_and_the_speed_settings_come_from_the_configuration() -> None:
    config = RunConfig.model_validate(
        {
            "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 3},
            "training": {"activation_checkpointing": "full", "compile": True},
            "quantize": {"float8": True},
            "comm": {"timeout_s": 7},
        }
    )
    s = TrainerSettings.from_config(config)
    assert (s.data_parallel, s.tensor_parallel, s.pipeline_parallel, s.ranks) == (3, 2, 1, 6)
    assert (s.activation_checkpointing, s.compile, s.float8, s.timeout_s) == ("full", True, True, 7.0)

"""The warm start of version 0 on a device for which code is compiled: few shapes, and nothing left on it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from forge_core.observability.memory import OutOfMemory
from forge_core.runs import initialise
from forge_core.training import trainer
from forge_core.training.policy import Prepared
from tests.runs.harness import memory, new_run

pytestmark = pytest.mark.engine
WARM = (
    "warm_start={dataset: {path: 'python://forge_core.data.sort_digits:demonstrations', options: {size: 200}}, "
    "steps: 4, batch_size: 24}"
)


def test_memory_that_runs_out_is_named_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(trainer, "micro_loss", scarce)
    message = r"warm start: out of memory, when 2\.00 GiB more(.|\n)*training\.token_budget"
    with pytest.raises(OutOfMemory, match=message):
        initialise.initialise(new_run(memory(), WARM))


def test_it_uses_few_shapes_and_its_memory_is_free_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, models, freed = set(), [], []
    setup, loss = trainer.TitanTrainer.setup, trainer.micro_loss

    def noted_setup(self: trainer.TitanTrainer) -> None:
        setup(self)
        models.append(weakref.ref(self._model))

    def noted_loss(model: Any, prepared: Prepared, *args: Any) -> Any:
        shapes.add(tuple(prepared.batch.input_ids.shape))
        return loss(model, prepared, *args)

    monkeypatch.setattr(trainer, "sizes_for", lambda device, compiled: 1)
    monkeypatch.setattr(trainer.TitanTrainer, "setup", noted_setup)
    monkeypatch.setattr(trainer, "micro_loss", noted_loss)
    monkeypatch.setattr(initialise, "free_cached_memory", lambda: freed.extend(model() for model in models))
    initialise.initialise(new_run(memory(), WARM, "training.token_budget=64"))
    assert shapes
    assert shapes <= {(4, 16), (1, 64)}
    assert freed == [None], "the model was gone before"

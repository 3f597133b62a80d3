"""Probes in a run: which versions have one, and what becomes of weights that do not compute theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core.models import probe
from forge_core.models.errors import WeightsError
from forge_core.models.scratch import create
from forge_core.runs.context import RunContext
from forge_core.store import layout
from tests.runs.harness import advance, make_batch, memory, new_run, tiny

pytestmark = pytest.mark.engine


def test_every_trained_version_has_a_probe_and_a_foreign_one_is_not_taken_over(tmp_path: Path) -> None:
    create(tiny().model, 5, tmp_path)
    probe.write(tmp_path, probe.sequences(21, 15), [[-1.0] * 14] * probe.SEQUENCES, "float32")
    ctx = advance(new_run(memory(), f"model={tmp_path}"), 2)
    assert [probe.read(ctx.weights_dir(version)) is not None for version in range(3)] == [False, True, True]
    assert ctx.generator(2).get_version() == 2


def with_another_probe(ctx: RunContext, version: int) -> None:
    """Publish the files of ``version`` again, as a candidate whose probe says something else."""
    folder = ctx.weights_dir(version)
    found = json.loads((folder / probe.PROBE).read_text())
    found["logprobs"] = [[x - 0.01 for x in row] for row in found["logprobs"]]
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    prefix = layout.weights(ctx.run_id, version + 1, "wrong")
    ctx.store.publish(prefix, {**files, probe.PROBE: json.dumps(found).encode()}, request="wrong")
    ctx.candidates[version + 1] = prefix


def test_weights_that_do_not_compute_their_probe_never_sample() -> None:
    ctx = advance(new_run(memory()), 2)
    assert ctx.generator(1).get_version() == 1
    with_another_probe(ctx, 2)
    with pytest.raises(WeightsError, match=r"probe of version 3 differ from the trainer's by 0.01"):
        ctx.generator(3)
    assert ctx.generator(1).get_version() == 1
    make_batch(ctx, 2)  # and the run goes on with what is right
    assert ctx.generator(2).get_version() == 2

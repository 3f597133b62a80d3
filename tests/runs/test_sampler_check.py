"""A sampler that computes something else than the trainer is noticed before anything is committed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.models.probe import TOLERANCE
from forge_core.runs.consumption import load_step
from forge_core.runs.context import RunContext
from forge_core.runs.initialise import initialise
from forge_core.runs.sampler_check import SamplerMismatch, check_sampler
from forge_core.runs.training import train_batch
from forge_core.store import layout
from tests.runs.harness import make_batch, memory, new_run, tiny

VLLM = "generator.backend=vllm"
GPU = (("0",),)


def host(*overrides: str, gpus: Any = ((),), trainer: str = "cpu", role: str | None = None, parent: Any = None) -> Any:
    """What the check asks of a run."""
    return SimpleNamespace(
        config=tiny(*overrides), role=role, record=SimpleNamespace(parent=parent),
        placement=SimpleNamespace(generator=gpus), device=lambda name: trainer,
    )  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize(
    ("run", "allowed"),
    [
        (host(), "float32"),
        (host(VLLM), "float32"),
        (host(VLLM, gpus=GPU), "tensorfloat32"),
        (host(trainer="cuda"), "tensorfloat32"),
        (host(VLLM, role="trainer"), "tensorfloat32"),  # where the engine is, this process does not know
        (host("training.dtype=bfloat16"), "bfloat16"),
        (host("generator.dtype=bfloat16"), "bfloat16"),
        (host(VLLM, "generator.engine_args.quantization=fp8", gpus=GPU), "float8"),
        (host("quantize.float8=true", trainer="cuda"), "float8"),
    ],
)
def test_the_two_may_differ_by_as_much_as_the_coarsest_type_rounds(run: Any, allowed: str) -> None:
    check_sampler(run, 0, 0.99 * TOLERANCE[allowed])
    for gap in (1.01 * TOLERANCE[allowed], math.nan):
        with pytest.raises(SamplerMismatch, match=rf"^training step 0: .* \(allowed: {TOLERANCE[allowed]}\)"):
            check_sampler(run, 0, gap)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("run", "batch", "gap"),
    [
        (host(), 1, 9.0),  # old episodes
        (host(), 0, None),  # a loss that does not measure it
        (host(parent={"run": "other"}), 0, 9.0),
        (host("rollout.top_p=0.9", "rollout.allow_truncated_sampling=true"), 0, 9.0),
        (host(VLLM, "generator.sampling_params.repetition_penalty=1.2"), 0, 9.0),
        (host(VLLM, "generator.engine_args.logits_processors=[mine]"), 0, 9.0),
    ],
)
def test_where_they_differ_by_nature_nothing_is_said(run: Any, batch: int, gap: float | None) -> None:
    check_sampler(run, batch, gap)


@pytest.mark.fast
def test_settings_that_only_end_a_response_change_no_distribution() -> None:
    with pytest.raises(SamplerMismatch):
        check_sampler(host(VLLM, "generator.sampling_params={ignore_eos: true, stop_token_ids: [2]}"), 0, 9.0)


@pytest.mark.engine
def test_a_run_ends_before_anything_is_committed_and_goes_on_with_what_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = new_run(memory(), "eval.prompts=0")
    initialise(ctx)
    make_batch(ctx, 0)

    def shifted(run: RunContext, batch: int) -> Any:
        data = load_step(run, batch)
        for episode in data.generated:
            episode.response_logprobs = [value - 0.5 for value in episode.response_logprobs]
        return data

    with monkeypatch.context() as other_kernels:
        other_kernels.setattr("forge_core.runs.training.load_step", shifted)
        for _ in range(2):
            with pytest.raises(SamplerMismatch, match=r"differ by 0\.5 on average"):
                train_batch(ctx, 0)
    assert ctx.ledger.head() == 0
    assert not ctx.store.published(layout.weights(ctx.run_id, 1, ctx.attempt))
    entry = train_batch(ctx, 0)
    assert (entry["version_out"], entry["episodes"]["trained"] > 0) == (1, True)
    fresh = new_run(memory(), "eval.prompts=0")
    initialise(fresh)
    make_batch(fresh, 0)
    assert train_batch(fresh, 0)["state_digest"] == entry["state_digest"], "the refused step left nothing"

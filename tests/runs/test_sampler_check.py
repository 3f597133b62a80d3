"""A sampler that computes something else than the trainer is noticed before anything is committed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.models.probe import TOLERANCE
from forge_core.runs import stages
from forge_core.runs.consumption import load_step
from forge_core.runs.initialise import initialise
from forge_core.runs.sampler_check import SamplerMismatch, check_sampler
from forge_core.runs.training import train_batch
from forge_core.store import layout
from tests.runs.harness import make_batch, memory, new_run, tiny

VLLM = "generator.backend=vllm"
TRUNCATED = "rollout.allow_truncated_sampling=true"
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
        with pytest.raises(SamplerMismatch, match=rf"^training step 0: .* \(allowed: {TOLERANCE[allowed]:.3g}\)"):
            check_sampler(run, 0, gap)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("run", "batch", "gap"),
    [
        (host(), 1, 9.0),  # old episodes
        (host(), 0, None),  # a loss that does not measure it
        (host(parent={"run": "other"}), 0, 9.0),
        (host("rollout.top_p=0.9", TRUNCATED), 0, 9.0),
        (host(VLLM, "generator.sampling_params.repetition_penalty=1.2", TRUNCATED), 0, 9.0),
        (host(VLLM, "generator.engine_args.logits_processors=[mine]", TRUNCATED), 0, 9.0),
    ],
)
def test_where_they_differ_by_nature_nothing_is_said(run: Any, batch: int, gap: float | None) -> None:
    check_sampler(run, batch, gap)


@pytest.mark.fast
@pytest.mark.parametrize("settings", ["{ignore_eos: true, stop_token_ids: [2]}", "{repetition_penalty: 1}"])
def test_settings_that_change_no_distribution_excuse_nothing(settings: str) -> None:
    with pytest.raises(SamplerMismatch):
        check_sampler(host(VLLM, f"generator.sampling_params={settings}"), 0, 9.0)


@pytest.mark.fast
def test_rounding_grows_with_the_logits_as_the_temperature_falls() -> None:
    check_sampler(host("grpo.temperature=0.1"), 0, 9 * TOLERANCE["float32"])
    for temperature in (0.1, 2.0):
        with pytest.raises(SamplerMismatch):
            check_sampler(host(f"grpo.temperature={temperature}"), 0, 11 * TOLERANCE["float32"])


@pytest.mark.engine
def test_a_run_ends_before_anything_is_committed_and_says_that_its_episodes_are_of_no_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = new_run(memory(), "eval.prompts=0")
    initialise(ctx)
    write = stages.episode_row

    def shifted(*asked: Any) -> dict[str, Any]:
        row = write(*asked)
        return {**row, "response_logprobs": [value - 0.5 for value in row["response_logprobs"]]}

    with monkeypatch.context() as other_kernels:
        other_kernels.setattr(stages, "episode_row", shifted)
        make_batch(ctx, 0)
    for _ in range(2):  # what was sampled stays what it is
        with pytest.raises(SamplerMismatch, match=r"differ by 0\.5 on average .* of no use: start a new one without"):
            train_batch(ctx, 0)
    assert ctx.ledger.head() == 0
    assert not ctx.store.published(layout.weights(ctx.run_id, 1, ctx.attempt))


@pytest.mark.engine
def test_what_was_refused_leaves_nothing_in_the_trainer() -> None:
    ctx = new_run(memory(), "eval.prompts=0")
    initialise(ctx)
    make_batch(ctx, 0)
    data = load_step(ctx, 0)
    for episode in data.generated:
        episode.response_logprobs = [value - 0.5 for value in episode.response_logprobs]
    with pytest.raises(SamplerMismatch):
        ctx.trainer.learn(data)
    fresh = new_run(memory(), "eval.prompts=0")
    initialise(fresh)
    make_batch(fresh, 0)
    assert train_batch(ctx, 0)["state_digest"] == train_batch(fresh, 0)["state_digest"]

"""Drawing tokens: support, log-probabilities and distribution against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

from forge_core.data_model import GenerationRequest, SamplingParams
from forge_core.generation.sampling import RowSampling, draw_uniforms, sample

CPU = torch.device("cpu")
LOGITS_V = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2]))  # likeliest first: 1, 3, 4, 2, 0


def draw(params: SamplingParams, uniforms: torch.Tensor, logits_V: torch.Tensor = LOGITS_V):
    rows = RowSampling.of([params] * len(uniforms), CPU)
    return sample(logits_V.expand(len(uniforms), -1), rows, uniforms.double())


def even(n: int) -> torch.Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def support(params: SamplingParams) -> dict[int, float]:
    """Token -> log-probability over a fine grid of uniform numbers."""
    tokens, logprobs = draw(params, even(2000))
    return dict(zip(tokens.tolist(), logprobs.tolist(), strict=True))


def chi_square_is_small(tokens: torch.Tensor, probs: torch.Tensor) -> bool:
    """Whether counts agree with ``probs``: within 5 standard deviations of chi-square's mean."""
    assert (probs[tokens] > 0).all()
    expected = probs[probs > 0] * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probs))[probs > 0]
    freedom = len(expected) - 1
    return float(((counts - expected) ** 2 / expected).sum()) < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_log_probabilities_are_those_of_the_tempered_softmax(temperature):
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    rows = RowSampling.of([SamplingParams(temperature=temperature)] * 64, CPU)
    tokens, logprobs = sample(logits, rows, even(64))
    expected = torch.log_softmax(logits / temperature, -1)[torch.arange(64), tokens]
    assert torch.allclose(logprobs, expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax(temperature):
    logits = torch.randn(30, generator=torch.Generator().manual_seed(1)) * 2
    uniforms = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens, _ = draw(SamplingParams(temperature=temperature), uniforms, logits)
    assert chi_square_is_small(tokens, torch.softmax(logits / temperature, -1))


def test_truncated_tokens_follow_the_renormalised_softmax():
    uniforms = torch.rand(50_000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tokens, _ = draw(SamplingParams(top_k=3), uniforms)
    assert chi_square_is_small(tokens, torch.tensor([0, 0.4, 0, 0.25, 0.2]) / 0.85)


def test_greedy_takes_the_likeliest_token_and_scores_it_at_temperature_one():
    tokens, logprobs = draw(SamplingParams(temperature=0, top_k=1), even(4))
    assert tokens.tolist() == [1] * 4
    assert logprobs.tolist() == pytest.approx([math.log(0.4)] * 4, abs=1e-6)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=1), [1]),
        (SamplingParams(top_k=3), [1, 3, 4]),
        (SamplingParams(top_k=99), [0, 1, 2, 3, 4]),
        (SamplingParams(top_p=0.01), [1]),
        (SamplingParams(top_p=0.6), [1, 3]),
        (SamplingParams(top_p=0.7), [1, 3, 4]),
        (SamplingParams(min_p=0.3), [1, 3, 4]),
        (SamplingParams(min_p=1.0), [1]),
        (SamplingParams(top_k=2, top_p=0.6), [1]),  # of two tokens renormalised the first has 0.615
        (SamplingParams(min_p=0.3, top_p=0.75), [1, 3]),  # of three tokens renormalised two have 0.765
    ],
)
def test_truncation_keeps_the_right_tokens_and_renormalises(params, kept):
    found = support(params)
    assert sorted(found) == kept
    probs = torch.softmax(LOGITS_V, -1)
    mass = sum(float(probs[t]) for t in kept)
    for token, logprob in found.items():
        assert logprob == pytest.approx(math.log(float(probs[token]) / mass), abs=1e-5)


def test_top_k_keeps_exactly_k_of_equal_tokens():
    tokens, logprobs = draw(SamplingParams(top_k=2), even(100), torch.zeros(6))
    assert set(tokens.tolist()) == {0, 1}
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 100)


def test_a_token_of_probability_zero_is_never_drawn_at_the_ends_of_the_interval():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    tokens, _ = draw(SamplingParams(), torch.tensor([0.0, 1 - 2**-50], dtype=torch.float64), logits)
    assert tokens.tolist() == [1, 3]


def test_rows_with_different_settings_do_not_touch_each_other():
    settings = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=2),
        SamplingParams(temperature=1.5, top_p=0.7, min_p=0.1),
        SamplingParams(),
    ]
    uniforms = torch.full((5,), 0.77, dtype=torch.float64)
    tokens, logprobs = sample(LOGITS_V.expand(5, -1), RowSampling.of(settings, CPU), uniforms)
    for i, params in enumerate(settings):
        token, logprob = draw(params, uniforms[:1])
        assert token.item() == tokens[i].item()
        assert logprob.item() == logprobs[i].item()


def request(seed: int, steps: int, temperature: float = 1.0) -> GenerationRequest:
    return GenerationRequest(f"r{seed}", (1,), seed, SamplingParams(temperature=temperature, max_new_tokens=steps))


def test_uniforms_depend_on_the_seed_alone():
    alone = draw_uniforms([request(5, 40)])[0]
    among = draw_uniforms([request(4, 3), request(5, 40), request(2**63 - 1, 100)])
    assert torch.equal(among[1, :40], alone)
    assert not torch.equal(among[0, :3], alone[:3])
    assert float(among.min()) >= 0
    assert float(among.max()) < 1


def test_uniforms_leave_the_global_random_numbers_alone():
    before = torch.random.get_rng_state()
    draw_uniforms([request(5, 40), request(6, 40, temperature=0)])
    assert torch.equal(torch.random.get_rng_state(), before)

"""Golden values of torchforge's later loss library, which its makers checked against verl, TRL, SkyRL and NeMo-RL."""

from __future__ import annotations

import pytest
import torch

from forge_core.algorithms.losses import CISPOLoss, DAPOLoss, GRPOLoss, GSPOLoss, PolicyLoss, SAPOLoss
from forge_core.algorithms.ops import Totals, aggregate, compute_kl, compute_logprobs, compute_ratio

MASK = torch.tensor([[1.0, 0, 1, 0], [1, 1, 0, 0]])
GENERATOR = torch.tensor([[-2, -2.1, -1.9, -2], [-6, -1, -5, -0.5]])


@pytest.fixture
def drawn() -> dict[str, torch.Tensor]:
    """Drawn in this order after seed 42."""
    g = torch.Generator().manual_seed(42)
    logits = torch.randn(2, 4, 10, generator=g).requires_grad_()
    targets = torch.randint(0, 10, (2, 4), generator=g)
    ref = torch.randn(2, 4, generator=g) * 0.5 - 2
    return {"logits": logits, "targets": targets, "ref": ref, "advantages": torch.randn(2, 4, generator=g)}


@pytest.mark.parametrize(
    ("loss_fn", "loss", "norm"),
    [
        (GRPOLoss(0.2, 0.2), 0.260804, 0.137857),
        (GRPOLoss(), 0.259753, 0.137857),
        (DAPOLoss(), 0.445464, 0.191675),
        (CISPOLoss(), -0.083283, 0.492673),
        (GSPOLoss(0.2, 0.2), 0.242948, 0.158423),
        (GSPOLoss(1.0, 0.2), 0.018975, 0.517415),
        (SAPOLoss(), 0.376388, 0.437776),
    ],
    ids=["grpo", "grpo-clip-higher", "dapo", "cispo", "gspo", "gspo-low-1", "sapo"],
)
def test_loss_and_norm_of_the_gradient(drawn: dict, loss_fn: PolicyLoss, loss: float, norm: float) -> None:
    value, _ = loss_fn(drawn["logits"], drawn["targets"], drawn["advantages"], GENERATOR, MASK, drawn["ref"])
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-5)
    assert drawn["logits"].grad.norm().item() == pytest.approx(norm, abs=1e-5)


@pytest.mark.parametrize(("kl_type", "mean"), [("k1", -0.726448), ("k2", 0.460956), ("k3", 0.740411)])
def test_the_mean_of_each_kl_estimator(drawn: dict, kl_type: str, mean: float) -> None:
    kl = compute_kl(compute_logprobs(drawn["logits"], drawn["targets"]), drawn["ref"], MASK, kl_type)
    assert aggregate(kl, MASK, Totals(4, 2), "token_mean").item() == pytest.approx(mean, abs=1e-5)


def test_the_sequence_ratio(drawn: dict) -> None:
    ratio = compute_ratio(compute_logprobs(drawn["logits"], drawn["targets"]), GENERATOR, MASK, "sequence")
    expected = torch.tensor([[0.550758, 1, 0.550758, 1], [1.706051, 1.706051, 1, 1]])
    torch.testing.assert_close(ratio, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("tokens", "mean"), [(4, -0.348463), (8, -0.174231)])
def test_the_masked_mean_and_its_scale(drawn: dict, tokens: int, mean: float) -> None:
    found = aggregate(drawn["advantages"], MASK, Totals(tokens, 2), "token_mean")
    assert found.item() == pytest.approx(mean, abs=1e-5)
    assert aggregate(drawn["advantages"], torch.zeros(2, 4), Totals(0, 2), "token_mean").item() == 0.0

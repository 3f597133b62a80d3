"""Our library on the peers' vectors: ``evaluate`` computes a vector's outputs, in float64, under the same keys.

It reads ``algorithm``, ``peer``, ``inputs`` and ``params`` only, so it works on vectors it has never seen. Here are
conversions of a peer's arguments to ours (names, denominators, which log-probabilities are the anchor); all formulas
are the library's. Where our convention deliberately differs it returns None: ``why_not`` names the row of
``not_adopted.md`` that says why. More keys may come back than a vector lists.
"""

from __future__ import annotations

from typing import Any

from tests.conformance import estimators, policy, rules

FAMILIES = {
    "kl": estimators.kl,
    "kl in loss": estimators.kl_in_loss,
    "aggregation": estimators.aggregation,
    "selective log-softmax / entropy": estimators.logprobs,
    "compute_logprobs with alignment": estimators.aligned_logprobs,
    "DAPO soft overlong punishment": estimators.overlong,
    "dynamic-sampling filter": estimators.keep_groups,
    "ReinforceLoss": policy.torchforge_reinforce,
}


def evaluate(vector: dict[str, Any]) -> dict[str, Any] | None:
    """The outputs of ``vector`` as the library computes them (floats, lists), or None where it deliberately differs."""
    return None if why_not(vector) else compute(vector)


def why_not(vector: dict[str, Any]) -> str | None:
    """The row of ``not_adopted.md`` that says why ``vector`` is not reproduced; None: it is."""
    return rules.why_not(vector)


def compute(vector: dict[str, Any]) -> dict[str, Any]:
    """What the library gives, whether it agrees or not."""
    inputs = vector["inputs"]
    family = FAMILIES.get(vector["algorithm"])
    if family is None and ("rewards" in inputs or "token_level_rewards" in inputs):
        family = estimators.gae if "values" in inputs else estimators.advantages
    return (family or policy.policy_loss)(vector["peer"], vector["algorithm"], inputs, vector["params"])

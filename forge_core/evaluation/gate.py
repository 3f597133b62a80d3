"""The gate: whether a candidate may become the production model.

Invariants:
- Every check says what it measured, what was allowed, and why; the candidate passes when all do.
- A gain counts only with confidence: the lower bound of the paired bootstrap must be above ``min_gain``, so that equal
  policies never replace each other.
- What cannot be measured fails its check: a bound that is set is never skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from forge_core.config.retrain_config import GateSection
from forge_core.evaluation.results import Comparison, Summary


@dataclass(frozen=True)
class Measured:
    """What is known about a candidate, the model that it would replace, and how it was made. None: not measured."""

    candidate: Summary
    baseline: Summary
    comparison: Comparison
    kl: float | None
    tokens_per_second: float | None
    gpu_seconds: float | None


@dataclass(frozen=True)
class Check:
    name: str
    value: float | None
    threshold: float
    passed: bool
    why: str


@dataclass(frozen=True)
class Verdict:
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def reason(self) -> str:
        """One line: what failed, or what was gained."""
        failed = [check.why for check in self.checks if not check.passed]
        return "; ".join(failed) if failed else self.checks[0].why

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, "checks": [asdict(check) for check in self.checks]}


def judge(gate: GateSection, measured: Measured) -> Verdict:
    """The checks of ``gate``, in the order of its fields."""
    return Verdict(tuple(_checks(gate, measured)))


def _checks(gate: GateSection, m: Measured) -> Iterator[Check]:
    yield _gain(gate, m.comparison)
    if gate.max_length_growth is not None:
        growth = m.candidate.mean_tokens / max(m.baseline.mean_tokens, 1.0) - 1
        what = f"responses have {m.candidate.mean_tokens:.1f} tokens, {m.baseline.mean_tokens:.1f} before"
        yield _at_most("length_growth", growth, gate.max_length_growth, what)
    if gate.max_kl is not None:
        yield _at_most("kl", m.kl, gate.max_kl, "KL divergence from the production model, in nats a token")
    if gate.min_throughput is not None:
        yield _at_least("throughput", m.tokens_per_second, gate.min_throughput, "sampled tokens a second")
    if gate.max_gpu_seconds is not None:
        yield _at_most("gpu_seconds", m.gpu_seconds, gate.max_gpu_seconds, "GPU-seconds of training and evaluation")


def _gain(gate: GateSection, comparison: Comparison) -> Check:
    gain, bound = comparison.gain, comparison.bound
    passed = bound > gate.min_gain
    why = (
        f"the mean reward changed by {gain.mean:+.4f} over {gain.items} prompts, with {gate.confidence:.0%} confidence "
        f"by more than {bound:+.4f}: {'above' if passed else 'not above'} {gate.min_gain:g}"
    )
    return Check("gain", bound, gate.min_gain, passed, why)


def _at_most(name: str, value: float | None, limit: float, what: str) -> Check:
    if value is None:
        return Check(name, None, limit, False, f"{what}: could not be measured, and at most {limit:g} is allowed")
    passed = value <= limit
    return Check(name, value, limit, passed, f"{what}: {value:.4g}, {'within' if passed else 'above'} {limit:g}")


def _at_least(name: str, value: float | None, limit: float, what: str) -> Check:
    if value is None:
        return Check(name, None, limit, False, f"{what}: could not be measured, and at least {limit:g} is required")
    passed = value >= limit
    return Check(name, value, limit, passed, f"{what}: {value:.4g}, {'at least' if passed else 'below'} {limit:g}")

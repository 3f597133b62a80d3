"""Judging a candidate against the model that it would replace, and writing the decision into the registry.

Invariants:
- Both are evaluated on the same prompts with the same seeds; an evaluation that exists is not made again.
- The decision is one registry entry that holds the whole report. It is written only while the model that the candidate
  was compared with is still the production model; otherwise the candidate is judged again, against the new one.
- A retraining is decided once, however often it is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forge_core.devices import generator_shape
from forge_core.evaluation.divergence import kl_divergence
from forge_core.evaluation.gate import Measured, Verdict, judge
from forge_core.evaluation.policies import Policy, recorded_policy, version_policy
from forge_core.evaluation.provenance import version_record
from forge_core.evaluation.results import Evaluation, compare, read_evaluation, summarise
from forge_core.models.stored import RunVersion
from forge_core.retraining.beginning import Retraining, decision_of
from forge_core.stop import StopToken
from forge_core.store import Ledger, Store
from forge_core.weights.registry import PRODUCTION, Change, Entry, Record, Registry, promotion, rejection


@dataclass(frozen=True)
class Contest:
    """A candidate and the model that it would replace: ``production`` is its record, None while there is none (then
    the candidate is compared with the model that its run started from)."""

    record: Record
    candidate: Policy
    production: Record | None
    baseline: Policy


def enter(store: Store, work: Retraining) -> Contest:
    """Make the run's last version the candidate of the registry, so that nothing deletes it, and find its opponent."""
    registry, version = Registry(store, work.name), work.run.steps
    rows = {"rows": work.data["rows"], "rows_digest": work.data["digest"]}
    record = version_record(store, work.retrain_id, version, evaluation=None, data=rows)
    if decision_of(registry, work.retrain_id) is None:
        registry.register(record, f"retraining {work.retrain_id}: to be evaluated")
    candidate = version_policy(store, f"candidate of {work.name}", RunVersion(work.retrain_id, version))
    start = version_policy(store, f"start of {work.retrain_id}", work.start)
    production = registry.alias(PRODUCTION)
    if production is None:
        return Contest(record, candidate, None, start)
    baseline = recorded_policy(store, f"production of {work.name}", production)
    # Equal weights under the run's own name: then the evaluation that the run made can be taken over.
    return Contest(record, candidate, production, start if start.digest == baseline.digest else baseline)


def decide(
    store: Store, work: Retraining, contest: Contest, evaluations: dict[str, str], stop: StopToken
) -> Entry | None:
    """The entry that promotes or rejects the candidate; None when the production model changed meanwhile.
    ``evaluations``: the prefixes of ``candidate`` and ``baseline``."""
    one, other = (read_evaluation(store, evaluations[role]) for role in ("candidate", "baseline"))
    measured = _measured(store, work, contest, one, other, stop)
    verdict = judge(work.gate, measured)
    return _write(store, work, contest, verdict, _decision(work, contest, verdict, measured, evaluations))


def _measured(
    store: Store, work: Retraining, contest: Contest, one: Evaluation, other: Evaluation, stop: StopToken
) -> Measured:
    gate, kl = work.gate, None
    if gate.max_kl is not None:
        folders = [policy.folder(store) for policy in (contest.candidate, contest.baseline)]
        kl = kl_divergence(work.run, folders[0], folders[1], one.episodes, stop)
    tokens, seconds = (one.provenance.get(key) for key in ("tokens", "seconds"))
    return Measured(
        candidate=summarise(one),
        baseline=summarise(other),
        comparison=compare(one, other, gate.confidence),
        kl=kl,
        tokens_per_second=tokens / seconds if tokens is not None and seconds else None,
        gpu_seconds=gpu_seconds(store, work, one, other),
    )


def gpu_seconds(store: Store, work: Retraining, *evaluations: Evaluation) -> float:
    """Working seconds of the run's engines, and of the evaluations, times the GPUs of each (on the CPU: times one)."""
    replicas, each = generator_shape(work.run)
    trainer, generator = work.run.parallelism.ranks, replicas * each
    share = {"time/generate": generator, "time/reference": 1, "time/train": trainer, "time/publish": trainer}
    steps = _working_seconds(store, work.retrain_id, share)
    if work.sft is not None:
        ranks = work.sft.parallelism.ranks
        share = dict.fromkeys(("time/train", "time/publish", "time/validation"), ranks)
        steps += _working_seconds(store, str(work.sft.run.id), share)
    return steps + generator * sum(e.provenance.get("seconds", 0.0) for e in evaluations)


def _working_seconds(store: Store, run_id: str, share: dict[str, int]) -> float:
    """Seconds of a run's work times the GPUs of each kind of it; version 0 is the trainer's."""
    ledger = Ledger(store, run_id)
    init, metrics = ledger.init(), [entry["metrics"] for entry in ledger.entries()]
    start = init["metrics"].get("time/initialise", 0.0) * share["time/train"] if init else 0.0
    return start + sum(m.get(name, 0.0) * gpus for m in metrics for name, gpus in share.items())


def _decision(
    work: Retraining, contest: Contest, verdict: Verdict, measured: Measured, prefixes: dict[str, str]
) -> dict[str, Any]:
    """The report: everything that the decision rests on."""
    return {
        "retrain_id": work.retrain_id,
        "data_digest": work.data["digest"],
        "gate": verdict.to_json(),
        "evaluations": prefixes,
        "candidate": {"policy": str(contest.candidate.version), **measured.candidate.to_json()},
        "baseline": {"policy": str(contest.baseline.version), **measured.baseline.to_json()},
        "gpu_seconds": measured.gpu_seconds,
    }


def _write(
    store: Store, work: Retraining, contest: Contest, verdict: Verdict, decision: dict[str, Any]
) -> Entry | None:
    registry = Registry(store, work.name)
    record = {**contest.record, "evaluation": _figures(decision["evaluations"]["candidate"], decision["candidate"])}

    def change(head: Entry | None) -> Change | None:
        if decision_of(registry, work.retrain_id) or not _still(head, contest.production):
            return None
        if verdict.passed:
            return promotion(head, record, verdict.reason, decision)
        return rejection(head, record, verdict.reason, decision)

    return registry.change(change) or decision_of(registry, work.retrain_id)


def _still(head: Entry | None, production: Record | None) -> bool:
    return (head["aliases"][PRODUCTION] if head else None) == production


def _figures(prefix: str, summary: dict[str, Any]) -> dict[str, Any]:
    reward = summary["reward"]
    return {"prefix": prefix, **{key: reward[key] for key in ("mean", "low", "high")}, "prompts": reward["items"]}

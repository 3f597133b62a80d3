"""A decision about a candidate, for people: the report is a function of the registry entry alone."""

from __future__ import annotations

from typing import Any

from forge_core.weights.registry import Entry, shown

VERBS = {"promote": "promoted", "reject": "rejected"}


def report(entry: Entry) -> str:
    """A decision as Markdown: the verdict, every check, both evaluations, and where the candidate comes from."""
    decision, subject = entry["decision"], entry["subject"]
    checks = ["| | check | value | threshold | why |", "|---|---|---|---|---|"]
    policies = ["| | policy | reward | 95 % interval | pass@1 | tokens | truncated |", "|---|---|---|---|---|---|---|"]
    return "\n".join(
        [
            *(f"# {entry['name']}: {shown(subject)} {VERBS[entry['action']]}", "", entry["reason"], ""),
            *checks,
            *(_check(check) for check in decision["gate"]["checks"]),
            "",
            *policies,
            *(_policy(role, decision[role]) for role in ("candidate", "baseline")),
            "",
            f"Retraining {decision['retrain_id']} on {subject['data']['rows']} rows of {subject['data']['path']}, "
            f"{decision['gpu_seconds']:.1f} GPU-seconds. Registry entry {entry['n']}, {entry['at']}.",
        ]
    )


def _check(check: dict[str, Any]) -> str:
    value = "none" if check["value"] is None else f"{check['value']:.4g}"
    verdict = "passed" if check["passed"] else "**failed**"
    return f"| {verdict} | {check['name']} | {value} | {check['threshold']:g} | {check['why']} |"


def _policy(role: str, figures: dict[str, Any]) -> str:
    reward = figures["reward"]
    return (
        f"| {role} | {figures['policy']} | {reward['mean']:.4f} | {reward['low']:.4f} to {reward['high']:.4f} | "
        f"{figures['passes']['1']:.4f} | {figures['mean_tokens']:.1f} | {figures['truncated']:.1%} |"
    )

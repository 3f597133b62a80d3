"""How many responses rewards grade in a second, on one core and on all, and what a hanging answer costs.

    .venv/bin/python -m benchmarks.rewards

The mathematical answers are those of ``tests/conformance/vectors/math_verify.json``, each written in several ways so
that no result is in a cache; the other texts are made. The judge is a local server that takes 50 ms for a reply: what
is measured is our side. Rates include what ``RewardActor`` adds; the start of the processes is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance, write
from forge_core.config.reward_sections import verifier_section
from forge_core.rewards import RewardActor, RewardItem
from forge_core.rewards.actor import usable_cores
from tests.rewards.judge_server import Answer, JudgeServer

VECTORS = Path(__file__).parents[1] / "tests" / "conformance" / "vectors" / "math_verify.json"
SENTENCE = "First we add the two numbers, and then we divide the sum by what is left. "
LIGHT: dict[str, dict[str, Any]] = {
    "exact_match": {},
    "f1": {},
    "thinking": {},
    "format": {},
    "length": {"at_most": 100},
    "language": {},
    "last_integer": {},
}
HANGS = r"\boxed{9^{9^{9^{9^{9}}}}}"


def mathematics(copies: int) -> list[RewardItem]:
    vectors = [v["inputs"] for v in json.loads(VECTORS.read_text())]
    return [
        RewardItem("", f"Way {n} of {len(v['answer'])}. {v['answer']}", {"answer": v["gold"]})
        for n in range(copies)
        for v in vectors
    ]


def texts(count: int) -> list[RewardItem]:
    return [
        RewardItem(
            "", f"<think>{n} {SENTENCE * 12}</think><answer>{n}</answer>", {"answer": str(n), "response_tokens": n}
        )
        for n in range(count)
    ]


def rate(reward: dict[str, Any], items: list[RewardItem], workers: int | None = None) -> float:
    """Grades a second of the second half; the first half starts the processes, and loads what is loaded once."""
    actor = RewardActor([verifier_section(reward)], workers=workers)
    half = len(items) // 2
    actor.grade_many(items[:half])
    graded = actor.grade_many(items[half:])
    actor.close()
    assert all(g.status == "ok" for g in graded)
    return round(actor.grades_per_second, 1)


def judged(concurrency: int) -> float:
    server = JudgeServer(lambda *_: Answer(delay_s=0.05))
    try:
        reward = {"name": "llm_judge", "base_url": server.url, "model": "m", "concurrency": concurrency}
        return rate(reward, texts(60 * concurrency))
    finally:
        server.close()


def hanging(timeout_s: float) -> dict[str, float]:
    """Seconds for 200 answers, and for the same with one that hangs among them, in one process."""
    seconds = {}
    for name, extra in (("without", []), ("with_one", [RewardItem("", HANGS, {"answer": "5"})])):
        items = mathematics(2)
        actor = RewardActor([verifier_section({"name": "math", "timeout_s": timeout_s})], workers=1)
        actor.grade_many(items[:40])
        _, metrics = actor.grade_with_metrics([*items[:100], *extra, *items[100:]])
        seconds[name] = round((200 + len(extra)) / metrics["grades_per_second"], 2)
        assert metrics["math/failed"] == len(extra)
        actor.close()
    return {"timeout_s": timeout_s, **seconds}


def scaled(measure: Callable[[int], float]) -> dict[str, float]:
    return {str(n): measure(n) for n in sorted({1, usable_cores()})}


def main() -> None:
    result = {
        **provenance(),
        "grades_per_second": {
            "in_this_process": {name: rate({"name": name, **o}, texts(4000)) for name, o in LIGHT.items()},
            "math_by_processes": scaled(lambda n: rate({"name": "math"}, mathematics(20), n)),
            "regex_in_a_process": rate({"name": "regex", "pattern": r"<answer>\d+</answer>"}, texts(8000), 1),
            "judge_by_concurrency": {str(n): judged(n) for n in (1, 16)},
        },
        "one_hanging_answer": hanging(5.0),
    }
    write("rewards", result)


if __name__ == "__main__":
    main()

"""Evaluations as text: one line, and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forge_core.evaluation.results import Comparison, Summary

HEAD = ("", "reward", "interval", "pass@k", "tokens", "truncated", "samples", "not graded", "missing")


def rows(name: str, summary: Summary) -> Iterator[tuple[str, ...]]:
    """The cells of one evaluation, below ``HEAD``: of all prompts, then of each task."""
    yield _cells(name, summary)
    for task, inner in summary.tasks.items():
        yield _cells(f"{name}, {task}", inner)


def _cells(name: str, s: Summary) -> tuple[str, ...]:
    passes = ", ".join(f"{k}: {share:.3f}" for k, share in s.passes.items())
    interval = f"{s.reward.low:.4f} to {s.reward.high:.4f}"
    figures = (f"{s.mean_tokens:.1f}", f"{s.truncated:.1%}", str(s.samples), str(s.failed_grades), str(s.missing))
    return (name, f"{s.reward.mean:.4f}", interval, passes, *figures)


def comparison_line(names: Sequence[str], summaries: Sequence[Summary], comparison: Comparison | None) -> str:
    """The result in one line."""
    first = f"{names[0]}: reward {summaries[0].reward.mean:.4f} over {summaries[0].reward.items} prompts"
    if comparison is None:
        return first
    gain = comparison.gain
    return (
        f"{first}; {gain.mean:+.4f} against {names[1]} ({gain.low:+.4f} to {gain.high:+.4f}, {gain.confidence:.0%}; "
        f"p = {comparison.p_value:.2g}, paired permutation test); "
        f"better on {comparison.better}, equal on {comparison.equal}, worse on {comparison.worse} prompts"
    )


def table(names: Sequence[str], summaries: Sequence[Summary]) -> list[dict[str, str]]:
    """One row a policy and task, its cells by name."""
    head = ("policy", *HEAD[1:])
    lines = [cells for name, summary in zip(names, summaries, strict=True) for cells in rows(name, summary)]
    return [dict(zip(head, cells, strict=True)) for cells in lines]


def markdown(names: Sequence[str], summaries: Sequence[Summary], comparison: Comparison | None) -> str:
    lines = [cells for name, summary in zip(names, summaries, strict=True) for cells in rows(name, summary)]
    table = [f"| {' | '.join(cells)} |" for cells in (HEAD, ("---",) * len(HEAD), *lines)]
    return "\n".join([*table, "", comparison_line(names, summaries, comparison)])

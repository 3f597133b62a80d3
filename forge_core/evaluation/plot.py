"""Evaluations as a picture: mean rewards with their intervals, in all and by task, and pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from forge_core.evaluation.results import Summary

ALL = "all prompts"


def evaluation_png(names: Sequence[str], summaries: Sequence[Summary], target: Path | IO[bytes]) -> None:
    """Write a PNG. Left: the mean reward of each policy with its interval, for all prompts and for each task; right,
    where a prompt has several samples: pass@k."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sampled = any(len(summary.passes) > 1 for summary in summaries)
    figure = Figure(figsize=(10 if sampled else 6, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + sampled, squeeze=False)[0]
    _draw_rewards(panels[0], names, summaries)
    if sampled:
        _draw_passes(panels[1], names, summaries)
    figure.savefig(target, format="png")


def _draw_rewards(axes: Any, names: Sequence[str], summaries: Sequence[Summary]) -> None:
    groups = [ALL, *sorted({task for summary in summaries for task in summary.tasks})]
    width = 0.8 / len(names)
    for i, (name, summary) in enumerate(zip(names, summaries, strict=True)):
        found = {ALL: summary, **summary.tasks}
        places = [x for x, group in enumerate(groups) if group in found]
        rewards = [found[groups[x]].reward for x in places]
        means = [r.mean for r in rewards]
        below, above = [max(0.0, r.mean - r.low) for r in rewards], [max(0.0, r.high - r.mean) for r in rewards]
        offsets = [x + (i + 0.5) * width - 0.4 for x in places]
        axes.bar(offsets, means, width * 0.9, yerr=[below, above], capsize=4, alpha=0.8, label=name)
    axes.set_xticks(range(len(groups)), groups, rotation=0 if len(groups) < 4 else 30)
    axes.set_ylabel(f"mean reward, {summaries[0].reward.confidence:.0%} interval")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()


def _draw_passes(axes: Any, names: Sequence[str], summaries: Sequence[Summary]) -> None:
    for name, summary in zip(names, summaries, strict=True):
        axes.plot(list(summary.passes), list(summary.passes.values()), marker="o", label=name)
    ks = sorted({k for summary in summaries for k in summary.passes})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_xlabel("k, samples of a prompt")
    axes.set_ylabel("pass@k")
    axes.grid(alpha=0.3)
    axes.legend()

"""Where the time went: staleness, seconds by stage, throughput, and who overlapped with whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from forge_core.observability.entries import finite, seconds
from forge_core.observability.progress import seconds_of
from forge_core.report.curves import VERSION, Entry, label_axes
from forge_core.report.spans import Span, in_lanes
from forge_core.report.themes import Palette, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGE = "age/count/"
STAGES = (  # of a step: what is called how, in the order in which it happens
    ("time/generate", "generate"), ("time/score", "score"), ("time/reference", "reference"), ("time/load", "load"),
    ("time/train", "train"), ("time/publish", "publish"), ("time/eval", "evaluate"), ("time/validation", "validate"),
)  # fmt: skip
PARTS = ("time/load", "time/train", "time/publish", "time/eval", "time/validation")  # of the train task
BARS = 80
THIN = 0.004  # share of the timeline
RATES = ("generator", "scorer", "reference", "trainer")
ROLE_COLOURS = {"generator": 0, "scorer": 2, "reference": 3, "trainer": 1, "evaluation": 5}
PART_COLOURS = {"load": 7, "train": 1, "publish": 6, "work": 1}


def staleness(entries: Sequence[Entry], palette: Palette) -> Figure | None:
    """How many trained episodes were sampled how many versions before."""
    counts: Counter[int] = Counter()
    for entry in entries:
        for key, n in entry["metrics"].items():
            if key.startswith(AGE) and finite(n):
                counts[int(key.removeprefix(AGE))] += int(n)
    total = sum(counts.values())
    if not total:
        return None
    made = figure(6.0, 3.2)
    axes = made.subplots()
    ages = list(range(max(counts) + 1))
    bars = axes.bar(ages, [counts[age] for age in ages], width=0.7, color=palette.series(0))
    axes.bar_label(bars, [f"{counts[age] / total:.0%}" for age in ages], padding=2, fontsize=9, color=palette.ink)
    label_axes(axes, "Staleness of trained episodes", "age (training steps between sampling and training)", "episodes")
    axes.set_xticks(ages if len(ages) <= 20 else ages[:: len(ages) // 10])
    axes.margins(y=0.12)
    return made


def stage_seconds(entries: Sequence[Entry]) -> dict[str, float]:
    """Seconds of each stage, mean over the steps that have it; of stages that took any."""
    found = {}
    for key, name in STAGES:
        known = [e["metrics"][key] for e in entries if finite(e["metrics"].get(key))]
        if any(known):
            found[name] = sum(known) / len(known)
    return found


def stages(entries: Sequence[Entry], palette: Palette) -> Figure | None:
    """Left: seconds of each stage, mean of a step. Right: what the time from commit to commit went to."""
    means = stage_seconds(entries)
    if not means:
        return None
    made = figure(10.4, 3.4)
    left, right = made.subplots(1, 2, width_ratios=(1, 1.4))
    names = list(means)[::-1]
    bars = left.barh(names, [means[name] for name in names], color=palette.series(0), height=0.65)
    left.bar_label(bars, [f"{means[name]:.3g} s" for name in names], padding=3, fontsize=9, color=palette.ink)
    left.set_xlim(0.0, 1.25 * max(means.values()))
    left.grid(axis="y", visible=False)
    label_axes(left, "Stages, mean of a step", "seconds (engine-seconds of all shards)", "")
    _draw_steps(right, entries, palette)
    return made


def _draw_steps(axes: Any, entries: Sequence[Entry], palette: Palette) -> None:
    """Stacked: the parts of the train task, the rest of it, and the wait before it; means of neighbouring steps where
    there are many."""
    names = [name for key, name in STAGES if key in PARTS and any(e["metrics"].get(key) for e in entries)]
    keys = {name: key for key, name in STAGES}
    size = max(1, -(-len(entries) // BARS))
    groups = [entries[i : i + size] for i in range(0, len(entries), size)]
    xs = [group[-1]["version_out"] for group in groups]
    waits = waited(entries)
    bottoms = [0.0] * len(groups)
    rows: list[tuple[str, Callable[[Entry], float]]] = [(name, partial(_part, key=keys[name])) for name in names]
    rows.append(("other work", lambda e: max(0.0, seconds_of(e) - sum(_part(e, key) for key in PARTS))))
    rows.append(("waiting", lambda e: waits.get(e["batch"], 0.0)))
    colours = {"load": 7, "train": 1, "publish": 6, "evaluate": 5, "validate": 5, "other work": 3}
    for name, value in rows:
        heights = [sum(value(e) for e in group) / len(group) for group in groups]
        colour = palette.grid if name == "waiting" else palette.series(colours[name])
        axes.bar(xs, heights, width=0.9 * size, bottom=bottoms, color=colour, label=name)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    axes.set_ylim(0.0, 1.05 * max(*bottoms, 1e-9))
    axes.grid(axis="x", visible=False)
    label_axes(axes, "Trainer, from commit to commit", VERSION, "seconds a step")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _part(entry: Entry, key: str) -> float:
    return entry["metrics"].get(key) or 0.0


def waited(entries: Sequence[Entry]) -> dict[int, float]:
    """Seconds from the commit before to the start of each step, where the same process made both."""
    found = {}
    for before, entry in pairwise(entries):
        if before.get("attempt") == entry.get("attempt") and before["batch"] + 1 == entry["batch"]:
            found[entry["batch"]] = max(0.0, seconds(entry["started_at"]) - seconds(before["finished_at"]))
    return found


def throughput(rows: Mapping[str, Mapping[int, float]], palette: Palette) -> Figure | None:
    """Tokens a second of each role, and its idle share. ``rows``: metrics by key, then by version."""
    rates = {role: rows.get(f"{role}/tokens_per_second", {}) for role in RATES}
    idle = {role: rows.get(f"{role}/idle_share", {}) for role in ("generator", "trainer")}
    shown = [(t, u, f) for t, u, f in (("Throughput", "tokens per second", rates), ("Idle", "share of the time", idle))
             if any(f.values())]  # fmt: skip
    if not shown:
        return None
    made = figure(5.2 * len(shown) if len(shown) > 1 else 8.5, 3.2)
    for axes, (title, unit, found) in zip(made.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for role, values in found.items():
            if values:
                axes.plot(list(values), list(values.values()), color=palette.series(ROLE_COLOURS[role]), label=role,
                          marker="." if len(values) < 3 else None)  # fmt: skip
        label_axes(axes, title, VERSION, unit)
        if title == "Throughput":
            axes.set_yscale("log")
        else:
            axes.set_ylim(0.0, 1.05)
    made.legend(*made.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(RATES))
    return made


def gantt(found: Sequence[Span], palette: Palette) -> Figure | None:
    """Every role by time: bars are work, hatched ones waiting; the numbers are batches (v: the evaluated version)."""
    if not found:
        return None
    lanes = in_lanes(found)
    height = sum(len(rows) for _, rows in lanes)
    begin, end = min(s.start for s in found), max(s.end for s in found)
    made = figure(10.4, max(2.0, 1.2 + 0.38 * height))
    axes = made.subplots()
    ticks, at = [], 0
    for role, rows in lanes:
        ticks.append((at + (len(rows) - 1) / 2, role))
        for row in rows:
            for span in row:
                _draw_span(axes, span, at, begin, end - begin, palette)
            at += 1
        axes.axhline(at - 0.5, color=palette.grid, lw=0.8)
    axes.set_yticks([y for y, _ in ticks], [role for _, role in ticks])
    axes.set_ylim(at - 0.4, -0.6)
    axes.set_xlim(0.0, max(end - begin, 1e-3))
    axes.grid(axis="y", visible=False)
    label_axes(axes, "Who worked when", "seconds since the beginning of the window", "")
    _explain(axes, found, palette)
    return made


def _draw_span(axes: Any, span: Span, at: int, begin: float, whole: float, palette: Palette) -> None:
    start, width = span.start - begin, span.end - span.start
    if span.kind == "wait":
        axes.barh(at, width, left=start, height=0.5, color="none", edgecolor=palette.muted, hatch="////", lw=0.5)
        return
    colour = palette.series(PART_COLOURS[span.kind] if span.role == "trainer" else ROLE_COLOURS[span.role])
    edge = palette.ground if width > THIN * whole else colour  # a rim would hide a thin bar
    axes.barh(at, width, left=start, height=0.72, color=colour, edgecolor=edge, lw=0.6,
              alpha=0.55 if span.role == "trainer" and span.kind == "work" else 1.0)  # fmt: skip
    named = span.kind == "train" if span.role == "trainer" else span.kind == "work"
    if named and width > 0.012 * len(span.label) * whole:
        axes.text(start + width / 2, at, span.label, ha="center", va="center", fontsize=8, color=palette.ground)


def _explain(axes: Any, found: Sequence[Span], palette: Palette) -> None:
    from matplotlib.patches import Patch

    parts = {s.kind for s in found if s.role == "trainer"}
    colours = [(name, PART_COLOURS[name]) for name in ("load", "train", "publish") if name in parts]
    patches = [Patch(facecolor=palette.series(i), label=f"trainer: {name}") for name, i in colours]
    if "work" in parts:
        patches.append(Patch(facecolor=palette.series(1), alpha=0.55, label="trainer: other work"))
    if any(s.kind == "wait" for s in found):
        patches.append(Patch(facecolor="none", edgecolor=palette.muted, hatch="////", lw=0.5, label="waiting"))
    if patches:
        axes.figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))

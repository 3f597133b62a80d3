"""Curves of a run by policy version, or of several runs: pure functions of ledger entries.

Invariants:
- A metric that an entry lacks, or that is not finite, is a gap, never 0.
- At most ``POINTS`` points of a curve are drawn, however many steps there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_core.observability.entries import finite, held_out
from forge_core.observability.progress import spread
from forge_core.report.themes import Palette, figure, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Entry = Mapping[str, Any]
Runs = Mapping[str, Sequence[Entry]]  # entries by run id
POINTS, MARKED = 1000, 60
VERSION = "policy version (training steps)"


class Line(NamedTuple):
    """One metric of the ledger, how it is called, and how it is drawn."""

    key: str
    label: str
    style: str = "-"


class Panel(NamedTuple):
    """Several lines with one unit; left out where no run has any of them."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    share: bool = False  # between 0 and 1


REWARD = (Panel("Reward", "mean reward", (Line("reward/mean", "training batches"),)),)
LENGTHS = (
    Panel(
        "Length of responses", "tokens",
        (Line("response/mean_tokens", "mean"), Line("response/max_tokens", "longest", "--"),
         Line("response/min_tokens", "shortest", ":")),
    ),
    Panel("Cut at the length limit", "share of responses", (Line("response/truncated_share", "cut"),), share=True),
)  # fmt: skip
STABILITY = (
    Panel("Entropy", "nats per token", (Line("entropy", "entropy"),)),
    Panel("KL to the reference model", "nats per token", (Line("kl", "KL (k3)"),)),
    Panel(
        "Sampler against trainer", "nats per token",
        (Line("mismatch/mean_abs_logprob", "mean |difference|"), Line("mismatch/k3", "KL (k3)", "--")),
    ),
    Panel(
        "Clipped", "share of tokens",
        (Line("clip/fraction", "all"), Line("clip/high_fraction", "high", "--"), Line("clip/low_fraction", "low", ":")),
        share=True,
    ),
    Panel("Gradient norm", "norm, before clipping", (Line("grad_norm", "norm"),)),
    Panel("Policy loss", "loss", (Line("loss", "loss"),)),
)  # fmt: skip
SUPERVISED = (
    Panel("Loss", "nats per token", (Line("loss", "training rows"), Line("validation/loss", "held-out documents"))),
    Panel(
        "Gradient norm", "norm, before clipping", (Line("grad_norm", "mean"), Line("grad_norm/max", "largest", "--"))
    ),
    Panel("Entropy", "nats per token", (Line("entropy", "entropy"),)),
    Panel("Learning rate", "of the optimizer step", (Line("learning_rate", "learning rate"),)),
)


def points(entries: Sequence[Entry], key: str, at: str = "version_out") -> tuple[list[float], list[float]]:
    """Versions and values of the metric ``key``, where it is known."""
    known = [(e[at], e["metrics"][key]) for e in entries if finite(e["metrics"].get(key))]
    known = spread(known, POINTS)  # type: ignore[arg-type,assignment]
    return [x for x, _ in known], [y for _, y in known]


def panels(runs: Runs, wanted: Sequence[Panel], palette: Palette, columns: int = 2) -> Figure | None:
    """The panels that have anything to show, side by side: a colour a line for one run, a colour a run for several."""
    shown = [panel for panel in wanted if _known(runs, panel)]
    if not shown:
        return None
    across = min(columns, len(shown))
    down = math.ceil(len(shown) / across)
    made = figure(5.2 * across if across > 1 else 8.5, 2.7 * down if across > 1 else 3.4)
    grid = list(made.subplots(down, across, squeeze=False).flat)
    for axes, panel in zip(grid, shown, strict=False):
        _draw_panel(axes, runs, panel, palette)
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    return made


def _known(runs: Runs, panel: Panel) -> bool:
    """Whether a run has a value; one that is 0 from beginning to end says nothing (a KL without reference model)."""
    found = [y for entries in runs.values() for line in _drawn(runs, panel) for y in points(entries, line.key)[1]]
    return bool(found) and (panel.share or any(found))


def _drawn(runs: Runs, panel: Panel) -> tuple[Line, ...]:
    """The lines of a panel that are drawn: of several runs only the first, which its title then names."""
    return panel.lines[:1] if len(runs) > 1 else panel.lines


def _draw_panel(axes: Any, runs: Runs, panel: Panel, palette: Palette) -> None:
    several = len(runs) > 1
    for r, (run_id, entries) in enumerate(runs.items()):
        for i, line in enumerate(_drawn(runs, panel)):
            xs, ys = points(entries, line.key)
            if xs:
                label = run_id if several else line.label
                axes.plot(xs, ys, line.style, color=palette.series(r if several else i), marker=_marker(line, xs), ms=5,
                          label=plain(label))  # fmt: skip
    title = f"{panel.title}: {panel.lines[0].label}" if several and len(panel.lines) > 1 else panel.title
    label_axes(axes, title, VERSION, panel.unit)
    if panel.share:
        axes.set_ylim(bottom=0.0)
        axes.set_ylim(top=min(1.05, max(0.05, axes.get_ylim()[1])))
    if several or len(panel.lines) > 1:
        axes.legend()


def _marker(line: Line, xs: Sequence[float]) -> str | None:
    """Single measurements are marked: a line through two points hides how few there are."""
    if line.key.startswith("validation") and len(xs) <= MARKED:
        return "o"
    return "." if len(xs) < 3 else None


def label_axes(axes: Any, title: str, x: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if x == VERSION:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def reward(runs: Runs, palette: Palette) -> Figure | None:
    """Mean reward of each training batch, at the version that consumed it; evaluations on held-out prompts with their
    95 % intervals."""
    made = figure(8.5, 3.8)
    axes = made.subplots()
    for r, (run_id, entries) in enumerate(runs.items()):
        name = f"{plain(run_id)}: " if len(runs) > 1 else ""
        xs, ys = points(entries, "reward/mean", "version_in")
        if xs:
            axes.plot(xs, ys, color=palette.series(r), alpha=0.75, lw=1.2, label=f"{name}training batches",
                      marker="." if len(xs) < 3 else None)  # fmt: skip
        _draw_held_out(axes, held_out(entries), palette.series(r if len(runs) > 1 else 1), name)
    if not axes.has_data():
        return None
    label_axes(axes, "Reward", VERSION, "mean reward")
    made.legend(loc="outside lower center", ncols=2)  # wherever it lay within, it would hide a point or its interval
    return made


def _draw_held_out(axes: Any, held: Sequence[tuple[int, float, float, float]], colour: str, name: str) -> None:
    if held:
        versions, means = [v for v, *_ in held], [m for _, m, *_ in held]
        below = [max(m - low, 0.0) for _, m, low, _ in held]  # a mean may be rounded past its interval
        above = [max(high - m, 0.0) for _, m, _, high in held]
        axes.errorbar(versions, means, [below, above], capsize=3, lw=2.0, color=colour, marker="o", ms=5,
                      label=f"{name}held-out prompts, 95 % interval")  # fmt: skip


def components(runs: Runs, palette: Palette) -> Figure | None:
    """The mean of each component of the reward, unweighted; None where there is only one."""
    names = sorted({key for entries in runs.values() for e in entries for key in e["metrics"]
                    if key.startswith("reward/") and key.endswith("/mean") and key.count("/") > 1})  # fmt: skip
    if len(names) < 2:
        return None
    lines = tuple(Line(key, key.removeprefix("reward/").removesuffix("/mean")) for key in names[:8])
    unit, title = "mean, unweighted", "Components of the reward"
    shown = [Panel(title, unit, lines)] if len(runs) == 1 else [Panel(one.label, unit, (one,)) for one in lines]
    return panels(runs, shown, palette)

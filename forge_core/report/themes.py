"""Figures as SVG that follows the reader's colour scheme, and as PNG.

Invariants:
- A figure is drawn in light colours, no two of them equal. In an SVG they become variables that the page's style sheet
  sets for light and for dark.
- An SVG refers to nothing outside of itself, and its text is text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Colour(NamedTuple):
    """``name`` in the style sheet, and its values on light and on dark ground."""

    name: str
    light: str
    dark: str


SERIES = 4  # place of the first colour of a series
COLOURS = (
    Colour("ground", "#ffffff", "#15181e"),
    Colour("ink", "#1c2430", "#e6e9ef"),
    Colour("muted", "#5b6675", "#a3adbb"),
    Colour("grid", "#dde1e7", "#333a45"),
    Colour("blue", "#1f6fb4", "#6cb2f0"),
    Colour("orange", "#c2570c", "#f5a35c"),
    Colour("green", "#2b8045", "#6fcf8b"),
    Colour("violet", "#7a4fc0", "#b79cf2"),
    Colour("red", "#c0343c", "#f28087"),
    Colour("teal", "#117a7a", "#5fcdcb"),
    Colour("pink", "#b23a86", "#ee93cb"),
    Colour("olive", "#77711a", "#cfc765"),
)
SVG_STYLE: dict[str, object] = {
    "svg.fonttype": "none", "svg.hashsalt": "forge", "font.family": "sans-serif", "font.size": 10.0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10.0, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 9.0, "lines.linewidth": 1.6,
    "axes.axisbelow": True, "axes.grid": True, "hatch.linewidth": 0.6,
}  # fmt: skip
Draw = Callable[["Palette"], "Figure | None"]


class Palette:
    """The colours that a figure is drawn in."""

    ground, ink, muted, grid = (colour.light for colour in COLOURS[:SERIES])

    def series(self, i: int) -> str:
        """The colour of series ``i``; from the ninth on they repeat."""
        return COLOURS[SERIES + i % (len(COLOURS) - SERIES)].light

    @contextmanager
    def style(self) -> Iterator[None]:
        """Within, figures get these colours."""
        import matplotlib

        inks = ("text.color", "axes.labelcolor", "axes.titlecolor")
        muted = ("xtick.color", "ytick.color", "axes.edgecolor")
        grounds = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
        colours: dict[str, object] = {**dict.fromkeys(inks, self.ink), **dict.fromkeys(muted, self.muted)}
        colours |= {**dict.fromkeys(grounds, self.ground), "grid.color": self.grid}
        with matplotlib.rc_context(SVG_STYLE | colours):  # type: ignore[arg-type]
            yield


PALETTE = Palette()


def figure(width: float, height: float) -> Figure:
    """An empty figure (inches), drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(made)
    return made


def plain(text: str) -> str:
    """``text`` as a label: nothing in it is markup of the plotting library."""
    return text.replace("$", r"\$") if not text.startswith("_") else f" {text}".replace("$", r"\$")


def png(draw: Draw, target: Path | IO[bytes]) -> bool:
    """Write the figure as PNG; False: there is nothing to draw."""
    with PALETTE.style():
        made = draw(PALETTE)
        if made is not None:
            made.savefig(target, format="png")
    return made is not None


def svg_and_png(draw: Draw, label: str, target: Path) -> str | None:
    """Write the figure as PNG, and give it as an SVG element with ``label`` for those who cannot see it; None: there is
    nothing to draw."""
    document = io.StringIO()
    with PALETTE.style():
        made = draw(PALETTE)
        if made is None:
            return None
        made.savefig(target, format="png")
        made.set_layout_engine("none")  # it stays as it is laid out
        made.savefig(document, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _element(document.getvalue(), label)


def _element(document: str, label: str) -> str:
    from html import escape

    body = document[document.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r'<g id="[a-zA-Z]+[\w.]*_\d+">', "<g>", body)  # several figures share a page: ids are for one thing
    body = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1, flags=re.S)
    body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1, flags=re.S)
    for colour in COLOURS:
        body = body.replace(colour.light, f"var(--{colour.name})")
    return body.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def style_sheet() -> str:
    """The variables, for light and for dark."""
    light = " ".join(f"--{c.name}: {c.light};" for c in COLOURS)
    dark = " ".join(f"--{c.name}: {c.dark};" for c in COLOURS)
    return (
        f":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )

"""``forge report``: one HTML file that needs nothing else, and its figures as PNG.

Invariants:
- It reads the store and writes nothing there.
- Whatever a run lacks, the page is made: ``problems`` and the page say what could not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_core.report.alarms import alarms
from forge_core.report.facts import Facts, collect
from forge_core.report.figures import Drawing, drawings, learning
from forge_core.report.page import Figure, Section, page, run_section, settings_section
from forge_core.report.samples import phases
from forge_core.report.settings import differences
from forge_core.report.themes import svg_and_png
from forge_core.store import Store

PAGE = "report.html"


@dataclass(frozen=True)
class Written:
    """The page, its pictures, and what could not be read, by run."""

    page: Path
    pictures: list[Path]
    problems: dict[str, list[str]]


def write_report(store: Store, run_ids: Sequence[str], folder: Path) -> Written:
    """Write the report of one run, or of several with a comparison, into ``folder``, which is made.

    Raises ConfigError for a run of which nothing is stored, StoreError when the store does not answer at all.
    """
    runs = [collect(store, run_id) for run_id in dict.fromkeys(run_ids)]
    folder.mkdir(parents=True, exist_ok=True)
    sections, pictures = [], []
    if len(runs) > 1:
        figures, made = _drawn(_comparison(runs), folder, "comparison-")
        sections.append(_compared(runs, figures))
        pictures += made
    for facts in runs:
        figures, made = _drawn(drawings(facts), folder, f"{facts.run_id}-" if len(runs) > 1 else "")
        sections.append(run_section(facts, figures, [] if facts.supervised else phases(facts), alarms(facts)))
        pictures += made
    target = folder / PAGE
    target.write_text(page([facts.run_id for facts in runs], store.uri, sections), encoding="utf-8")
    return Written(target, pictures, {facts.run_id: facts.problems for facts in runs})


def _comparison(runs: Sequence[Facts]) -> list[Drawing]:
    """Curves of all GRPO runs in one, and of all supervised ones."""
    made = []
    for supervised in (False, True):
        found = {facts.run_id: facts.entries for facts in runs if facts.supervised is supervised}
        if len(found) > 1:
            made += learning(found, supervised=supervised)
    return made


def _compared(runs: Sequence[Facts], figures: Sequence[Figure]) -> Section:
    return settings_section(runs, figures, differences({f.run_id: f.config for f in runs}))


def _drawn(found: Sequence[Drawing], folder: Path, prefix: str) -> tuple[list[Figure], list[Path]]:
    figures, pictures = [], []
    for one in found:
        file = folder / f"{prefix}{one.name}.png"
        element = svg_and_png(one.draw, one.title, file)
        if element is not None:
            figures.append(Figure(one, element))
            pictures.append(file)
    return figures, pictures

"""The page of a report.

Invariants:
- It is one file: nothing is fetched, and its content security policy forbids scripts and requests altogether.
- Everything that comes from a run (texts, names, settings, errors) is escaped: completions are untrusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

from forge_core.observability.alarms import Alarm
from forge_core.observability.entries import held_out, seconds
from forge_core.observability.progress import duration
from forge_core.report.facts import Facts
from forge_core.report.figures import Drawing
from forge_core.report.samples import Phase, Sample
from forge_core.report.settings import shown
from forge_core.report.style import STYLE
from forge_core.report.themes import style_sheet
from forge_core.visible import visible

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
LONGEST = 6000  # characters of a text


@dataclass(frozen=True)
class Figure:
    """A drawing as an SVG element."""

    drawing: Drawing
    element: str


@dataclass(frozen=True)
class Section:
    """``anchor`` is its id on the page; ``parts``: title and HTML of what it consists of."""

    anchor: str
    title: str
    parts: list[tuple[str, str]]


def text(value: object) -> str:
    """``value`` as text of the page: escaped, control characters made visible, cut where it is very long."""
    whole = str(value).encode("utf-8", "replace").decode("utf-8")
    cut = f"… ({len(whole) - LONGEST:,} more characters)" if len(whole) > LONGEST else ""
    return escape(visible(whole[:LONGEST]) + cut)


def page(run_ids: Sequence[str], store: str, sections: Sequence[Section]) -> str:
    """The whole document."""
    title = f"Forge report: {', '.join(run_ids)}"
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    links = "".join(f'<li><a href="#{s.anchor}">{text(s.title)}</a>{_contents(s)}</li>' for s in sections)
    body = "".join(_section(section) for section in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style_sheet()}{STYLE}</style></head><body><header><h1>{text(title)}</h1>"
        f'<p class="muted">from {text(store)}, {made}</p></header><nav><ul>{links}</ul></nav><main>{body}</main>'
        "</body></html>\n"
    )


def _contents(section: Section) -> str:
    links = (f'<li><a href="#{_anchor(section, title)}">{text(title)}</a></li>' for title, _ in section.parts)
    return f"<ul>{''.join(links)}</ul>"


def _anchor(section: Section, title: str) -> str:
    return f"{section.anchor}-{''.join(c if c.isalnum() else '-' for c in title.lower())}"


def _section(section: Section) -> str:
    parts = "".join(f'<h3 id="{_anchor(section, title)}">{text(title)}</h3>{html}' for title, html in section.parts)
    return f'<section id="{section.anchor}"><h2>{text(section.title)}</h2>{parts}</section>'


def run_section(facts: Facts, figures: Sequence[Figure], phases: Sequence[Phase], alarms: Sequence[Alarm]) -> Section:
    """Everything about one run."""
    parts = [("Summary", _summary(facts))]
    if facts.problems:
        parts.append(("Problems", _list(facts.problems, "problem")))
    if facts.failures:
        rows = [[f.at, f.role, f.host, f.error] for f in facts.failures[-20:]]
        parts.append(("Failures", _table(("when", "role", "host", "error"), rows)))
    if alarms:
        rows = [[str(alarm.step), alarm.at, alarm.name, alarm.message] for alarm in alarms]
        parts.append(("Alarms", _table(("step", "when", "alarm", "what"), rows)))
    parts += [_figure(figure) for figure in figures]
    if phases:
        parts.append(("Samples", "".join(_phase(phase) for phase in phases)))
    parts.append(("Configuration", _configuration(facts)))
    return Section(f"run-{facts.run_id}", facts.run_id, parts)


def settings_section(
    runs: Sequence[Facts], figures: Sequence[Figure], rows: Sequence[tuple[str, list[str]]]
) -> Section:
    """Several runs side by side."""
    names = [facts.run_id for facts in runs]
    known = [dict(_facts(facts)) for facts in runs]
    keys = dict.fromkeys(key for one in sorted(known, key=len, reverse=True) for key in one)
    facts_rows = [[key, *(one.get(key, "–") for one in known)] for key in keys]
    different = _table(("key", *names), [[key, *values] for key, values in rows]) if rows else "<p>None.</p>"
    parts = [("Side by side", _table(("", *names), facts_rows)), *(_figure(figure) for figure in figures)]
    return Section("comparison", "Comparison", [*parts, ("Settings that differ", different)])


def _figure(figure: Figure) -> tuple[str, str]:
    one = figure.drawing
    caption = f"<figcaption>{text(one.caption)}</figcaption>"
    return one.title, f'<figure class="{one.name}">{figure.element}{caption}</figure>'


def _summary(facts: Facts) -> str:
    state = "" if facts.entries else '<p class="problem">No training step was committed.</p>'
    return state + _table((), [[key, value] for key, value in _facts(facts)])


def _facts(facts: Facts) -> list[tuple[str, str]]:
    """What is said of a run in one line each."""
    entries, steps = facts.entries, facts.steps
    found = [("flow", facts.flow), ("state", facts.state), ("created", facts.about.get("created_at", "unknown")),
             ("steps committed", f"{len(entries)} of {steps if steps is not None else 'unknown'}")]  # fmt: skip
    if entries:
        wall = seconds(entries[-1]["finished_at"]) - seconds(entries[0]["started_at"])
        tokens = sum(e.get("tokens", 0) for e in entries)
        found += [("last commit", entries[-1]["finished_at"]), ("from first to last step", duration(wall)),
                  ("tokens", f"{tokens:,}"), *_results(facts), *_episodes(facts)]  # fmt: skip
    found.append(("stored", f"{len(facts.sizes):,} objects, {sum(facts.sizes.values()) / 1e6:,.1f} MB"))
    return found


def _results(facts: Facts) -> Iterable[tuple[str, str]]:
    keys = ("loss", "validation/loss") if facts.supervised else ("reward/mean",)
    for key in keys:
        known = [e["metrics"][key] for e in facts.entries if e["metrics"].get(key) is not None]
        if known:
            yield key, f"{known[0]:.3f} at first, {known[-1]:.3f} at last"
    if held := held_out(facts.entries):
        (v0, m0, *_), (v1, m1, low, high) = held[0], held[-1]
        yield (
            "held-out reward",
            f"{m0:.3f} (version {v0}) → {m1:.3f} (version {v1}, 95 % interval {low:.3f} to {high:.3f})",
        )


def _episodes(facts: Facts) -> Iterable[tuple[str, str]]:
    counts = [e["episodes"] for e in facts.entries if isinstance(e.get("episodes"), dict)]  # a rescored run trains none
    dropped: dict[str, int] = {}
    for one in counts:
        for reason, n in one["dropped"].items():
            dropped[reason] = dropped.get(reason, 0) + n
    if counts:
        what = "documents" if facts.supervised else "episodes"
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(dropped.items()))
        yield f"{what} trained", f"{sum(c['trained'] for c in counts):,} of {sum(c['planned'] for c in counts):,}"
        yield "dropped", reasons or "none"


def _phase(phase: Phase) -> str:
    samples = "".join(_sample(sample) for sample in phase.samples)
    return f'<h4>The {phase.name}: batch {phase.batch}</h4><div class="samples">{samples}</div>'


def _sample(sample: Sample) -> str:
    parts = "".join(f"<li>{text(name)} {value:.4g}</li>" for name, value in sample.components.items())
    wanted = f"<dt>expected</dt><dd><pre>{text(sample.target)}</pre></dd>" if sample.target is not None else ""
    about = f"{sample.tokens} tokens, ended by {text(sample.finish_reason)}, version {sample.policy_version}"
    return (
        f'<article><h5>{sample.place} <b>{sample.reward:.4g}</b></h5><ul class="components">{parts}</ul>'
        f"<dl><dt>prompt</dt><dd><pre>{text(sample.prompt)}</pre></dd><dt>answer</dt><dd><pre>{text(sample.text)}</pre></dd>{wanted}</dl>"
        f'<p class="muted">{about}<br>{text(sample.episode_id)}</p></article>'
    )


def _configuration(facts: Facts) -> str:
    rows = "\n".join(_lines(facts.config, 0)) or "unknown"
    return f"<details><summary>all keys</summary><pre>{text(rows)}</pre></details>"


def _lines(value: Any, depth: int) -> Iterable[str]:
    pairs = value.items() if isinstance(value, dict) else (("-", item) for item in value)
    for key, below in pairs:
        nested = isinstance(below, dict | list) and below
        yield "  " * depth + (f"{key}:" if nested else f"{key}: {shown(below)}")
        if nested:
            yield from _lines(below, depth + 1)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = f"<thead><tr>{''.join(f'<th>{text(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    lines = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}<tbody>{lines}</tbody></table></div>'


def _list(items: Iterable[str], kind: str) -> str:
    return f'<ul class="{kind}">' + "".join(f"<li>{text(item)}</li>" for item in items) + "</ul>"

"""When each role worked, and when it waited: from the ledger and the manifests of stored shards.

Invariants:
- A span is what its own machine measured. Machines whose clocks differ are shown as they say.
- Only a window of steps is read, so a long run costs no more than a short one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge_core.observability.entries import STAGES, seconds
from forge_core.report.facts import Entry, Facts
from forge_core.store import layout
from forge_core.store.manifest import MANIFEST

WINDOW = 12  # steps: more are a blur
INNER = (("time/load", "load"), ("time/train", "train"), ("time/publish", "publish"))  # of a step, in their order


@dataclass(frozen=True)
class Span:
    """``start`` and ``end``: seconds since 1970. ``kind``: work, wait, or the part of a training step. ``lane`` tells
    the processes of one role apart; ``label``: the batch, or the evaluated version."""

    role: str
    lane: str
    start: float
    end: float
    kind: str
    label: str


def spans(facts: Facts) -> list[Span]:
    """Those of the newest ``WINDOW`` steps, and of what is open after them."""
    shown = facts.entries[-WINDOW:]
    first = shown[0]["batch"] if shown else 0
    before = {entry["batch"]: entry for entry in facts.entries}
    found = [span for entry in shown for span in _trained(entry, before.get(entry["batch"] - 1))]
    for kind, role in STAGES.items():
        prefixes = [p for batch, ps in facts.published(kind).items() if batch >= first for p in ps]
        found += _worked(facts, prefixes, role)
    return [*found, *_evaluated(facts, first)]


def _worked(facts: Facts, prefixes: list[str], role: str) -> Iterator[Span]:
    for prefix, made in zip(prefixes, _provenances(facts, prefixes), strict=True):
        if made is None or "seconds" not in made or "copied_from" in made:
            continue
        batch = str(int(prefix.split("/")[-3]))
        end = made.get("finished_at_s") or _stored_at(facts, prefix)
        if end is None:
            continue
        start, lane = end - made["seconds"], str(made.get("process", ""))
        yield Span(role, lane, start, end, "work", batch)
        if made.get("waited_seconds", 0.0) > 0.01:
            yield Span(role, lane, start - made["waited_seconds"], start, "wait", batch)


def _evaluated(facts: Facts, first: int) -> Iterator[Span]:
    """Evaluations end when they are stored, on the store's clock: they carry no other time."""
    start = f"{layout.run(facts.run_id)}evaluations/"
    prefixes = [k.removesuffix(MANIFEST) for k in facts.sizes if k.startswith(start) and k.endswith(f"/{MANIFEST}")]
    prefixes = [p for p in prefixes if int(p[len(start) :][:8]) >= first]
    for prefix, made in zip(prefixes, _provenances(facts, prefixes), strict=True):
        if made is not None and "seconds" in made and (end := _stored_at(facts, prefix)) is not None:
            yield Span("evaluation", "", end - made["seconds"], end, "work", f"v{int(prefix[len(start) :][:8])}")


def _stored_at(facts: Facts, prefix: str) -> float | None:
    return facts.tried(prefix, lambda: facts.store.written_at(prefix + MANIFEST))


def _provenances(facts: Facts, prefixes: list[str]) -> list[Mapping[str, Any] | None]:
    return facts.all_of(prefixes, lambda prefix: facts.store.open_published(prefix).manifest.provenance or {})


def _trained(entry: Entry, before: Entry | None) -> Iterable[Span]:
    start, end = seconds(entry["started_at"]), seconds(entry["finished_at"])
    lane, label = str(entry.get("attempt", "")), str(entry["batch"])
    if before is not None and before.get("attempt") == entry.get("attempt"):
        committed = seconds(before["finished_at"])
        if committed < start:
            yield Span("trainer", lane, committed, start, "wait", label)
    at = start
    for key, part in INNER:
        took = entry["metrics"].get(key, 0.0)
        if took > 0.0:
            yield Span("trainer", lane, at, min(end, at + took), part, label)
            at = min(end, at + took)
    yield Span("trainer", lane, at, end, "work", label)


def in_lanes(found: Iterable[Span]) -> list[tuple[str, list[list[Span]]]]:
    """By role, in the order of the stages: rows in which no two spans overlap; a process has rows of its own."""
    rows: dict[tuple[str, str], list[list[Span]]] = {}
    for span in sorted(found, key=lambda span: span.start):
        own = rows.setdefault((span.role, span.lane), [])
        free = next((row for row in own if row[-1].end <= span.start + 1e-3), None)
        if free is None:
            own.append([span])
        else:
            free.append(span)
    order = (*STAGES.values(), "trainer", "evaluation")
    return [(role, [row for (r, _), own in rows.items() if r == role for row in own]) for role in order
            if any(r == role for r, _ in rows)]  # fmt: skip

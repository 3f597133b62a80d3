"""The figures of a report: what each is called, what it says, and how it is drawn.

A run shows the same figures while it goes on (``live``): ``curves_of`` needs the ledger entries that it has, the others
read what its store has of the newest steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from forge_core.data_model import METRICS, from_parquet
from forge_core.observability.entries import STAGES, finite
from forge_core.observability.progress import spread
from forge_core.report import curves, times
from forge_core.report.curves import Entry, Runs
from forge_core.report.facts import Facts
from forge_core.report.spans import WINDOW, spans
from forge_core.report.themes import Draw
from forge_core.store import Store, layout
from forge_core.store.store import READERS

MOST = 300  # files of metrics that are read, evenly spaced


@dataclass(frozen=True)
class Drawing:
    """``name``: of its files and artifacts. ``caption``: what is seen, and what is not."""

    name: str
    title: str
    caption: str
    draw: Draw


def curves_of(entries: Sequence[Entry], *, supervised: bool = False) -> list[Drawing]:
    """The figures that ledger entries give."""
    return [*learning({"": entries}, supervised=supervised), *_shares(entries)]


def learning(runs: Runs, *, supervised: bool = False) -> list[Drawing]:
    """Curves of one run, or of several: then each has one colour."""
    if supervised:
        caption = "Losses are means over the tokens that count; a held-out loss is that of the version it stands at."
        return [Drawing("loss", "Loss and stability", caption, partial(curves.panels, runs, curves.SUPERVISED))]
    return [
        Drawing("reward", "Reward", "Training batches stand at the version that they trained; their answers are up to "
                "max_staleness versions older. Held-out prompts are never trained on.",
                partial(curves.reward, runs)),
        Drawing("components", "Components", "Before weights are applied.", partial(curves.components, runs)),
        Drawing("lengths", "Lengths", "Tokens that the policy sampled.", partial(curves.panels, runs, curves.LENGTHS)),
        Drawing("stability", "Entropy, KL, mismatch", "Means over the tokens that count in the loss. What stays 0, "
                "such as the KL of a run without a reference model, is left out.",
                partial(curves.panels, runs, curves.STABILITY)),
    ]  # fmt: skip


def _shares(entries: Sequence[Entry]) -> list[Drawing]:
    return [
        Drawing("staleness", "Staleness", "Over all committed steps. No episode is older than max_staleness.",
                partial(times.staleness, entries)),
        Drawing("stages", "Time per stage", "Stages overlap, so the bars on the left do not add up to a step. A wait "
                "is known from the second step of a process on.", partial(times.stages, entries)),
    ]  # fmt: skip


def drawings(facts: Facts) -> list[Drawing]:
    """All figures of one run, in the order of the page."""
    return [*curves_of(facts.entries, supervised=facts.supervised), *_work(facts)]


def live(store: Store, run_id: str, entries: Sequence[Entry], *, supervised: bool = False) -> Iterator[Drawing]:
    """The same of a run that goes on, of which ``entries`` are known. What needs the store comes last, and costs no
    more for a long run than for a short one."""
    yield from curves_of(entries, supervised=supervised)
    yield from _work(Facts(store, run_id, _newest(store, run_id, entries), entries=[dict(entry) for entry in entries]))


def _newest(store: Store, run_id: str, entries: Sequence[Entry]) -> dict[str, int]:
    """Keys and sizes of what ``_work`` looks at: all but the shards of old batches."""
    root, first = layout.run(run_id), entries[-WINDOW:][0]["batch"] if entries else 0
    batches = range(first, first + 2 * WINDOW)  # and what is open after them
    folders = [f"{root}{kind}/{layout.number(batch)}" for kind in STAGES for batch in batches]
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(store.sizes, [layout.metrics_folder(run_id), f"{root}evaluations", *folders])
        return {key: size for sizes in found for key, size in sizes.items()}


def _work(facts: Facts) -> list[Drawing]:
    """What the roles did: from the files of metrics and the manifests of shards."""
    window = (
        f"The newest {WINDOW} steps and what is open after them; where a row is empty, there was nothing to do. Each "
        "role is as its own machine's clock says; an evaluation ends when it is stored."
    )
    return [
        Drawing("throughput", "Throughput", "Tokens per second while a role works (logarithmic), and the share of time "
                "in which it does not.", partial(times.throughput, metric_rows(facts))),
        Drawing("gantt", "Timeline", window, partial(times.gantt, spans(facts))),
    ]  # fmt: skip


def metric_rows(facts: Facts) -> Mapping[str, Mapping[int, float]]:
    """What only the metrics table has, by key and version: rates and idle shares."""
    present = [e for e in facts.entries if layout.metrics(facts.run_id, e["batch"]) in facts.sizes]
    keys = [layout.metrics(facts.run_id, e["batch"]) for e in spread(present, MOST)]
    found: dict[str, dict[int, float]] = {}
    for rows in facts.all_of(keys, lambda key: from_parquet(facts.store.read(key), METRICS, key)):
        for row in rows or []:
            if row["source"] is None and finite(row["value"]) and row["key"].endswith(("_share", "tokens_per_second")):
                found.setdefault(row["key"], {})[row["version"]] = row["value"]
    return found

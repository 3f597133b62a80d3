"""What a person sees of a run: a live line and a closing table.

Everything is made from ledger entries (plain dicts), so a finished or resumed run shows the same as a live one.
Rewards are means over a batch's graded episodes; the time of a step is the time between two commits.

Invariants:
- A terminal gets one live display; anything else (a file, CI) gets one plain line per step, without control codes.
- A metric that an entry lacks is shown as ``-``, never as 0.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import count
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

Entry = Mapping[str, Any]

EVALUATED = {"eval/reward/mean", "validation/loss"}
TABLE_ROWS = 12
WINDOW = 10  # steps over which speed is averaged


class ProgressDisplay:
    """Live progress of run ``run_id`` towards ``total`` training steps.

    :meth:`start` it with the entries that are committed already, :meth:`update` it with each new one (any thread, one
    at a time), :meth:`close` it at the end.
    """

    def __init__(
        self,
        run_id: str,
        total: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._done = 0
        self._clock = clock
        self._console = console or Console()
        self._commits: list[tuple[float, int]] = []
        self._evaluation: float | None = None
        self._bar = Progress(
            TextColumn(f"{run_id}  step {{task.completed:.0f}}/{{task.total:.0f}}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            auto_refresh=self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total, status="waiting for the first step")

    def start(self, entries: Sequence[Entry] = ()) -> None:
        """Begin to measure and, on a terminal, to show; ``entries`` were committed before."""
        self._done = len(entries)
        self._commits = [(self._clock(), 0)]
        for entry in entries:
            self._evaluation = entry["metrics"].get("eval/reward/mean", self._evaluation)
        self._bar.update(self._task, completed=self._done)
        if self._console.is_terminal:
            self._bar.start()

    def close(self) -> None:
        """Leave the last state on the screen. Idempotent."""
        if self._console.is_terminal:
            self._bar.stop()

    def update(self, entry: Entry) -> None:
        """Show that ``entry`` was committed."""
        self._done += 1
        self._commits = [*self._commits[-WINDOW:], (self._clock(), int(entry["tokens"]))]
        self._evaluation = entry["metrics"].get("eval/reward/mean", self._evaluation)
        status = self._status(entry)
        self._bar.update(self._task, completed=self._done, status=status)
        if not self._console.is_terminal:
            self._console.print(f"step {self._done}/{self.total}  {status}", highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def _status(self, entry: Entry) -> str:
        seconds, tokens = self._speed()
        return "  ".join(
            [
                f"reward {_number(entry['metrics'].get('reward/mean'))}",
                f"eval {_number(self._evaluation)}",
                f"staleness {entry['max_age']}",
                f"{tokens:,.0f} tokens/s",
                f"left {duration((self.total - self._done) * seconds)}",
            ]
        )

    def _speed(self) -> tuple[float, float]:
        """Seconds per step and tokens per second over the newest steps."""
        elapsed = self._commits[-1][0] - self._commits[0][0]
        steps = len(self._commits) - 1
        tokens = sum(n for _, n in self._commits[1:])
        return elapsed / steps, tokens / elapsed if elapsed > 0 else 0.0


COLUMNS: dict[str, Callable[[Entry], str]] = {
    "step": lambda e: str(e["version_out"]),
    "reward": lambda e: metric(e, "reward/mean"),
    "eval": lambda e: metric(e, "eval/reward/mean"),
    "staleness": lambda e: str(e["max_age"]),
    "trained": lambda e: f"{e['episodes']['trained']}/{e['episodes']['planned']}",
    "tokens": lambda e: f"{e['tokens']:,}",
    "loss": lambda e: metric(e, "loss"),
    "KL": lambda e: metric(e, "kl"),
    "entropy": lambda e: metric(e, "entropy"),
    "grad norm": lambda e: metric(e, "grad_norm"),
    "seconds": lambda e: f"{seconds_of(e):.2f}",
}


def closing_table(entries: Sequence[Entry], run_id: str) -> Table:
    """What a run has done; ``seconds`` is from a train task's start to its commit."""
    return steps_table(entries, COLUMNS, _title(entries), run_id)


def steps_table(
    entries: Sequence[Entry], columns: Mapping[str, Callable[[Entry], str]], title: str | None, run_id: str | None
) -> Table:
    """A row for each step. With a ``run_id``, of many steps only some (``thinned``): then the caption says which, and
    where all of them are."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    shown, n = thinned(entries, TABLE_ROWS) if run_id else (entries, 1)
    for entry in shown:
        table.add_row(*(cell(entry) for cell in columns.values()))
    if len(shown) < len(entries):
        table.caption = f"a row every {n} steps, the first and the last; all {len(entries)}: forge ledger {run_id}"
    return table


def thinned(entries: Sequence[Entry], rows: int) -> tuple[list[Entry], int]:
    """The first, the last, and every ``n``-th, with the smallest round ``n`` that leaves no more than ``rows``; and
    ``n``. Steps (from 1) that ``n`` divides, or those as far from them as most steps with an evaluation are."""
    for n in (digit * 10**zeros for zeros in count() for digit in (1, 2, 5)):
        offset = _offset(entries, n)
        shown = [e for e in entries if (e["batch"] + 1) % n == offset or e is entries[0] or e is entries[-1]]
        if len(shown) <= rows:
            return shown, n
    raise AssertionError("a large n leaves two")


def _offset(entries: Sequence[Entry], n: int) -> int:
    evaluated = [e for e in entries[1:-1] if EVALUATED & e.get("metrics", {}).keys()]
    offsets = Counter((e["batch"] + 1) % n for e in evaluated)
    return max(offsets, key=lambda offset: (offsets[offset], -offset), default=0)


def spread(entries: Sequence[Entry], rows: int) -> list[Entry]:
    """At most ``rows`` entries, evenly spaced, the first and the last among them."""
    if len(entries) <= rows:
        return list(entries)
    return [entries[round(i * (len(entries) - 1) / (rows - 1))] for i in range(rows)]


def metric(entry: Entry, name: str) -> str:
    """A metric as it is shown."""
    return _number(entry["metrics"].get(name))


def _title(entries: Sequence[Entry]) -> str:
    if not entries:
        return "no training step was committed"
    tokens = sum(e["tokens"] for e in entries)
    oldest = max(e["max_age"] for e in entries)
    wall = sum(_worked(entries[i - 1] if i else None, entry) for i, entry in enumerate(entries))
    return f"{len(entries)} steps, {tokens:,} tokens, oldest episode {oldest} steps behind, {duration(wall)}"


def _worked(before: Entry | None, entry: Entry) -> float:
    """Seconds to ``entry`` from the one before, or from its start where another process had made that: a run that was
    stopped for a night has not worked then."""
    resumed = before is None or before.get("attempt") != entry.get("attempt")
    start = entry["started_at"] if before is None or resumed else before["finished_at"]
    return (_time(entry["finished_at"]) - _time(start)).total_seconds()


def seconds_of(entry: Entry) -> float:
    """From a train task's start to its commit."""
    return (_time(entry["finished_at"]) - _time(entry["started_at"])).total_seconds()


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def duration(seconds: float) -> str:
    """Seconds as ``1:02:03`` or ``2:03``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"

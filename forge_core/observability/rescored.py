"""What a person sees of stored episodes that are graded again: a line a batch, and a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from forge_core.observability.progress import Entry, ProgressDisplay, steps_table


class RescoreProgress(ProgressDisplay):
    def _status(self, entry: Entry) -> str:
        seconds, _ = self._speed()
        shown = f"reward {COLUMNS['reward'](entry)}  before {COLUMNS['before'](entry)}"
        left = round((self.total - entry["batch"] - 1) * seconds)
        return f"{shown}  changed {entry['changed']}/{entry['episodes']}  left {left // 60}:{left % 60:02d}"


COLUMNS: dict[str, Callable[[Entry], str]] = {
    "batch": lambda e: str(e["batch"]),
    "reward": lambda e: f"{e['metrics']['reward/mean']:.3f}",
    "before": lambda e: f"{e['metrics']['parent/reward/mean']:.3f}",
    "changed": lambda e: f"{e['changed']}/{e['episodes']}",
    "failed": lambda e: str(e["failed"]),
    "tokens": lambda e: f"{e['tokens']:,}",
}


def rescored_table(entries: Sequence[Entry], title: str | None = None, run_id: str | None = None) -> Table:
    """Mean reward of each batch now and before, and how many episodes have another one; with a ``run_id`` of many
    batches only some (``steps_table``)."""
    return steps_table(entries, COLUMNS, title, run_id)


def rescored_title(entries: Sequence[Entry]) -> str:
    changed, episodes = (sum(e[key] for e in entries) for key in ("changed", "episodes"))
    return f"{len(entries)} batches graded again: {changed} of {episodes} rewards are others"

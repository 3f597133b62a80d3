"""What a person sees of a supervised run: a line a training step and a closing table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from forge_core.observability.progress import Entry, ProgressDisplay, duration, metric, seconds_of, steps_table

LOSS, VALIDATION, SPEED = "loss", "validation/loss", "time/tokens_per_second"


class SftProgress(ProgressDisplay):
    _validated = "-"

    def start(self, entries: Sequence[Entry] = ()) -> None:
        for entry in entries:
            self._note_validation(entry)
        super().start(entries)

    def update(self, entry: Entry) -> None:
        self._note_validation(entry)
        super().update(entry)

    def _note_validation(self, entry: Entry) -> None:
        if VALIDATION in entry["metrics"]:
            self._validated = metric(entry, VALIDATION)

    def _status(self, entry: Entry) -> str:
        seconds, _ = self._speed()
        return "  ".join(
            [
                f"loss {metric(entry, LOSS)}",
                f"validation {self._validated}",
                f"{entry['metrics'][SPEED]:,.0f} tokens/s",
                f"left {duration((self.total - self._done) * seconds)}",
            ]
        )


COLUMNS: dict[str, Callable[[Entry], str]] = {
    "step": lambda e: str(e["version_out"]),
    "loss": lambda e: metric(e, LOSS),
    "validation": lambda e: metric(e, VALIDATION),
    "documents": lambda e: f"{e['episodes']['trained']:,}",
    "tokens": lambda e: f"{e['tokens']:,}",
    "packed": lambda e: f"{e['metrics']['data/packed']:.1%}",
    "grad norm": lambda e: metric(e, "grad_norm"),
    "tokens/s": lambda e: f"{e['metrics'][SPEED]:,.0f}",
    "seconds": lambda e: f"{seconds_of(e):.2f}",
}


def sft_table(entries: Sequence[Entry], title: str | None = None, run_id: str | None = None) -> Table:
    """All training steps; with a ``run_id`` of many only some (``steps_table``). ``packed`` is the share of positions
    that hold a token."""
    return steps_table(entries, COLUMNS, title, run_id)


def sft_title(entries: Sequence[Entry]) -> str:
    """The whole run in a line."""
    tokens, seconds = sum(e["tokens"] for e in entries), sum(e["metrics"]["time/train"] for e in entries)
    return f"{len(entries)} training steps, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s while training"

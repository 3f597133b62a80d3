"""``forge watch``: the state of a run on a terminal, or as plain text."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flows.commands.common import UNLIMITED
from forge_core.observability.progress import duration, metric
from forge_core.report.watching import State, Watched
from forge_core.runs.formats import SFT
from forge_core.runs.liveness import KILLED
from forge_core.store import StoreError
from forge_core.visible import visible

LOOK_S = 2.0  # between two looks, at least
BARS = "▁▂▃▄▅▆▇█"


def show_once(watched: Watched) -> None:
    """Print one screen. Raises StoreError."""
    _console().print(screen(watched, watched.look()), soft_wrap=False)


def follow(watched: Watched) -> None:
    """Show the state until the run is finished: live on a terminal, else a screen at each change. A store that does not
    answer is said, and asked again."""
    console = _console()
    pause = max(LOOK_S, watched.store.longest_poll_s)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            for shown in _screens(watched, pause):
                live.update(shown, refresh=True)
        return
    for shown in _screens(watched, pause, changes_only=True):
        console.print(shown)


def _screens(watched: Watched, pause: float, *, changes_only: bool = False) -> Iterator[RenderableType]:
    before: object = None
    while True:
        try:
            state = watched.look()
        except (StoreError, OSError) as outage:
            yield Text(f"the store does not answer: {outage}")
        else:
            alarms = tuple(alarm.name for alarm in state.alarms)
            now = (state.version, state.word, state.stops, state.failure, alarms)
            if not changes_only or now != before:
                yield screen(watched, state)
            before = now
            if state.finished:
                return
        time.sleep(pause)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=UNLIMITED)


def screen(watched: Watched, state: State) -> RenderableType:
    """All of a state."""
    parts: list[RenderableType] = [
        Text(f"{watched.run_id}  {_progress(state)}", style="bold"),
        *_curves(watched, state),
    ]
    parts.append(_roles(state))
    if state.workers:
        parts.append(_workers(state))
    parts += [Text(f"alarm {alarm.at}: {alarm.message} (step {alarm.step})", style="yellow") for alarm in state.alarms]
    if state.failure:
        failure = state.failure
        parts.append(
            Text(f"last error ({failure.role} on {failure.host}, {failure.at}): {visible(failure.error)}", style="red")
        )
    return Group(*parts)


def _progress(state: State) -> str:
    whole = "no version yet" if state.version < 0 else f"step {state.version} of {state.steps}"
    stopped = f", {state.stops} stop request{'s' if state.stops > 1 else ''}" if state.stops else ""
    return f"{whole}, {state.word}{'' if state.finished else stopped}{_nobody(state)}"


def _nobody(state: State) -> str:
    """For how long nobody has been there, where somebody was killed."""
    if state.word != KILLED:
        return ""
    return f": no sign of life for {duration(min(worker.silent_s for worker in state.workers))}"


def _curves(watched: Watched, state: State) -> Iterator[Text]:
    names = ("loss", "validation/loss") if watched.record.flow == SFT else ("reward/mean",)
    for name in names:
        known = [e for e in state.entries if e["metrics"].get(name) is not None]
        if known:
            values = [e["metrics"][name] for e in known]
            yield Text(f"{name:16} {sparkline(values)} {metric(known[-1], name)}")
    if state.held_out:
        version, mean, low, high = state.held_out
        yield Text(f"{'held-out reward':16} {mean:.3f} (version {version}, 95 % interval {low:.3f} to {high:.3f})")


def sparkline(values: Sequence[float]) -> str:
    """A bar a value, from the lowest to the highest of them."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((v - low) / span * len(BARS)))] for v in values)


def _roles(state: State) -> Table:
    table = _table("role", "newest object", "age", "complete shards of open batches")
    for role in state.roles:
        waiting = ", ".join(f"batch {batch}: {n}" for batch, n in role.open.items())
        age = "" if role.age_s is None else duration(role.age_s)
        table.add_row(role.name, role.newest or "none yet", age, waiting)
    return table


def _workers(state: State) -> Table:
    table = _table("process", "host", "made", "does")
    for worker in state.workers:
        silent = f" (silent for {duration(worker.silent_s)})" if worker.silent else ""
        ended = "has ended with an error" if worker.failed else "has ended"
        doing = ended if worker.ended else f"{worker.doing}{silent}"
        table.add_row(*(escape(visible(text)) for text in (worker.name, worker.host, str(worker.made), doing)))
    return table


def _table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD if sys.stdout.isatty() else box.ASCII)

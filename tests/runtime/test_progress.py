from __future__ import annotations

import io

import pytest
from rich.console import Console

from forge_core.observability.progress import ProgressDisplay, closing_table, spread, thinned
from tests.runtime.entries import entry, learning_run


def console(terminal: bool, width: int = 160) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=width, color_system=None), text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_each_step_is_one_plain_line_with_speed_and_time_left() -> None:
    out, text = console(terminal=False)
    clock = Clock()
    display = ProgressDisplay("run-7", 10, console=out, clock=clock)
    display.start()
    for e in learning_run(3):
        clock.now += 2.0
        display.update(e)
    display.close()
    lines = text.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[2] == "step 3/10  reward 0.095  eval 0.020  staleness 1  2,048 tokens/s  left 0:14"
    assert "\x1b" not in text.getvalue()


def test_a_resumed_run_counts_from_where_it_is() -> None:
    out, text = console(terminal=False)
    clock = Clock()
    display = ProgressDisplay("run-7", 100, console=out, clock=clock)
    display.start(learning_run(90))
    clock.now += 60.0
    display.update(entry(90))
    display.close()
    assert text.getvalue().startswith("step 91/100  reward -  eval 1.002  staleness 1  68 tokens/s  left 9:00")


def test_a_terminal_gets_one_live_display_with_the_newest_step() -> None:
    out, text = console(terminal=True)
    clock = Clock()
    display = ProgressDisplay("run-7", 3, console=out, clock=clock)
    display.start()
    for e in learning_run(3):
        clock.now += 1.0
        display.update(e)
    display.note("a note above the bar")
    display.close()
    display.close()
    shown = text.getvalue()
    assert "run-7  step 3/3" in shown
    assert "reward 0.095" in shown
    assert "a note above the bar" in shown


def table_of(steps: int) -> tuple[list[list[str]], str]:
    out, text = console(terminal=False)
    out.print(closing_table(learning_run(steps), "run-7"))
    shown = text.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    return rows, shown


def test_the_table_shows_first_and_last_step_and_the_totals() -> None:
    rows, shown = table_of(60)
    assert rows[0][:5] == ["1", "0.000", "0.020", "0", "60/64"]
    assert rows[-1] == ["60", "0.948", "-", "1", "60/64", "4,096", "0.010", "2.0e-05", "1.100", "0.400", "1.50"]
    assert "60 steps, 245,760 tokens, oldest episode 1 steps behind, 2:00" in shown


def test_rows_that_are_left_out_are_said_and_the_others_are_in_round_steps() -> None:
    out, text = console(terminal=False)
    out.print(closing_table([entry(batch) for batch in range(53)], "run-7"))
    shown = text.getvalue()
    steps = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert steps == ["1", "5", "10", "15", "20", "25", "30", "35", "40", "45", "50", "53"]
    assert "a row every 5 steps, the first and the last; all 53: forge ledger run-7" in shown
    rows, shown = table_of(12)
    assert [row[0] for row in rows] == [str(step) for step in range(1, 13)]
    assert "forge ledger" not in shown


def test_rows_are_those_with_an_evaluation() -> None:
    """Evaluations of a run with ``max_staleness`` come some steps later than round ones."""
    rows, shown = table_of(100)
    assert [row[0] for row in rows] == ["1", "11", "21", "31", "41", "51", "61", "71", "81", "91", "100"]
    assert "-" not in [row[2] for row in rows[:-1]]
    assert "a row every 10 steps, the first and the last; all 100" in shown


def test_a_run_that_rested_for_a_night_has_not_worked_then() -> None:
    entries = learning_run(4)
    for e in entries[2:]:
        e["attempt"] = "the next morning"
        for key in ("started_at", "finished_at"):
            e[key] = e[key].replace("2026-01-01", "2026-01-02")
    out, text = console(terminal=False)
    out.print(closing_table(entries, "run-7"))
    assert "4 steps, 16,384 tokens, oldest episode 1 steps behind, 0:07" in text.getvalue()


@pytest.mark.parametrize("steps", [1, 13, 24, 100, 1999, 10_000])
def test_no_table_has_more_rows_than_it_may(steps: int) -> None:
    entries = [{"batch": batch} for batch in range(steps)]
    shown, n = thinned(entries, 12)
    assert min(steps, 4) <= len(shown) <= 12
    assert {(e["batch"] + 1) % n for e in shown[1:-1]} <= {0}
    assert (shown[0], shown[-1]) == (entries[0], entries[-1])


def test_a_run_without_a_step_has_a_table_that_says_so() -> None:
    out, text = console(terminal=False)
    out.print(closing_table([], "run-7"))
    assert "no training step was committed" in text.getvalue()


def test_spreading_keeps_order_ends_and_number() -> None:
    entries = learning_run(100)
    picked = [e["batch"] for e in spread(entries, 12)]
    assert len(picked) == 12
    assert picked == sorted(set(picked))
    assert (picked[0], picked[-1]) == (0, 99)
    assert spread(entries[:5], 12) == entries[:5]

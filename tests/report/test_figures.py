"""What is drawn can be read: nothing is hidden, axes have units, and a comparison names what it compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.observability.entries import STAGES
from forge_core.report import curves, times
from forge_core.report.facts import collect
from forge_core.report.figures import curves_of, drawings, learning, live
from forge_core.report.spans import Span
from forge_core.report.themes import PALETTE, png
from forge_core.store import Ledger, open_store
from tests.query.example import RUN, example_run
from tests.runtime.entries import entry, learning_run


def evaluated(version: int) -> dict[str, float]:
    names = {"version": float(version), "reward/mean": 0.5, "reward/low": 0.1, "reward/high": 0.9}
    return {f"eval/{name}": value for name, value in names.items()}


def test_the_legend_of_the_reward_hides_no_point_and_no_interval():
    entries = [entry(batch, **{"reward/mean": 0.5, **evaluated(batch)}) for batch in range(2)]
    with PALETTE.style():
        made = curves.reward({"": entries}, PALETTE)
        assert made is not None
        made.draw_without_rendering()
    (legend,), (axes,) = made.legends, made.axes
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert axes.get_legend() is None


def test_every_axis_of_every_curve_has_a_unit():
    for one in curves_of(learning_run(6)):
        made = one.draw(PALETTE)
        for axes in made.axes if made else ():
            assert not axes.get_visible() or (axes.get_xlabel() and (axes.get_ylabel() or axes.get_yticklabels()))


def titles(runs: dict[str, list], panels: tuple[curves.Panel, ...]) -> list[str]:
    with PALETTE.style():
        made = curves.panels(runs, panels, PALETTE)
    return [axes.get_title("left") for axes in made.axes if axes.get_visible()] if made else []


def test_a_comparison_says_which_line_of_a_panel_it_compares():
    lengths = {"response/mean_tokens": 5.0, "response/max_tokens": 8.0, "response/min_tokens": 2.0}
    entries = [entry(batch, **lengths) for batch in range(3)]
    assert titles({"a": entries}, curves.LENGTHS) == ["Length of responses"]
    assert titles({"a": entries, "b": entries}, curves.LENGTHS) == ["Length of responses: mean"]


def test_a_comparison_leaves_out_a_panel_whose_line_no_run_has():
    entries = [entry(batch, **{"response/max_tokens": 8.0}) for batch in range(3)]
    assert titles({"a": entries}, curves.LENGTHS) == ["Length of responses"]
    assert titles({"a": entries, "b": entries}, curves.LENGTHS) == []


def test_a_comparison_shows_every_component_of_every_run():
    runs = {
        "a": [entry(batch, **{"reward/math/mean": 0.5, "reward/style/mean": 0.2}) for batch in range(3)],
        "b": [entry(batch, **{"reward/math/mean": 0.6, "reward/words/mean": 0.1}) for batch in range(3)],
    }
    (drawing,) = [one for one in learning(runs) if one.name == "components"]
    with PALETTE.style():
        made = drawing.draw(PALETTE)
    assert made is not None
    shown = {axes.get_title("left"): [line.get_label() for line in axes.lines] for axes in made.axes if axes.lines}
    assert shown == {"math": ["a", "b"], "style": ["a"], "words": ["b"]}


@pytest.mark.parametrize("seconds", [0.001, 0.3])
def test_the_shortest_piece_of_work_is_seen_in_the_timeline(seconds: float, tmp_path: Path):
    from matplotlib.image import imread

    found = [Span("generator", "", 0.0, 60.0, "work", "0"), Span("scorer", "", 30.0, 30.0 + seconds, "work", "0")]
    assert png(lambda palette: times.gantt(found, palette), tmp_path / "gantt.png")
    green = tuple(int(PALETTE.series(times.ROLE_COLOURS["scorer"])[i : i + 2], 16) for i in (1, 3, 5))
    image = imread(tmp_path / "gantt.png")[:, :, :3] * 255
    assert (abs(image - green).sum(axis=2) < 120).sum() > 10


def test_a_run_that_goes_on_shows_the_figures_of_its_report(tmp_path: Path):
    store = example_run(open_store(str(tmp_path)), steps=3)
    entries = Ledger(store, RUN).entries()
    names = [one.name for one in live(store, RUN, entries)]
    assert names == [one.name for one in drawings(collect(store, RUN))]
    assert names[-2:] == ["throughput", "gantt"]


def test_what_a_long_run_shows_while_it_goes_on_costs_no_look_at_its_old_shards(tmp_path: Path):
    store = example_run(open_store(str(tmp_path)), steps=20)
    asked: list[str] = []
    sizes, opened = store.sizes, store.open_published
    store.sizes = lambda folder: (asked.append(folder), sizes(folder))[1]  # type: ignore[method-assign]
    store.open_published = lambda prefix: (asked.append(prefix), opened(prefix))[1]  # type: ignore[method-assign]
    found = {one.name: one for one in live(store, RUN, Ledger(store, RUN).entries())}
    assert png(found["gantt"].draw, tmp_path / "gantt.png")
    batches = {int(key.split("/")[3]) for key in asked if key.split("/")[2] in STAGES}
    assert {8, 19} <= batches
    assert min(batches) == 8
    assert len(asked) < 160

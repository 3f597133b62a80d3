"""The page of a report: what it shows of a run, however far the run came, and that untrusted text stays text."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flows.cli import BAD_INPUT, main
from forge_core.config import load_config
from forge_core.observability.entries import held_out
from forge_core.report import Written, write_report
from forge_core.report.alarms import alarms
from forge_core.report.facts import Facts, collect
from forge_core.report.figures import curves_of
from forge_core.report.page import page, run_section, text
from forge_core.report.samples import phases
from forge_core.report.settings import differences
from forge_core.report.spans import Span, in_lanes, spans
from forge_core.report.themes import png
from forge_core.runs.failures import record_failure
from forge_core.runs.record import create_run
from forge_core.store import Store, layout, open_store
from tests.query import example
from tests.query.example import RUN, example_run
from tests.runtime.entries import entry, learning_run

HOSTILE = "</pre><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&amp;\x00\x1b[31m\u202e$x_$"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return example_run(open_store(str(tmp_path / "store")))


def written(store: Store, folder: Path, *runs: str) -> tuple[Written, str]:
    made = write_report(store, runs or [RUN], folder)
    return made, made.page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Written, str]:
    """The report of the example run, and its page."""
    return written(example_run(open_store(f"memory://{os.urandom(8).hex()}")), tmp_path_factory.mktemp("whole"))


def texts_of(store: Store, run_id: str = RUN) -> tuple[Facts, str]:
    """The page without figures: they take the most time."""
    facts = collect(store, run_id)
    return facts, page([run_id], store.uri, [run_section(facts, [], phases(facts), alarms(facts))])


def visible(page: str) -> str:
    """The text of the page, as a reader sees it, without that of pictures' labels."""
    return re.sub(r"\s+", " ", " ".join(_Texts(page).found))


class _Texts(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def test_the_page_has_every_section_of_a_run_and_its_pictures_as_files(whole: tuple[Written, str]):
    made, page = whole
    titles = re.findall(r"<h3[^>]*>([^<]+)</h3>", page)
    assert titles == ["Summary", "Reward", "Entropy, KL, mismatch", "Time per stage", "Throughput", "Timeline",
                      "Samples", "Configuration"]  # fmt: skip
    assert [file.name for file in made.pictures] == [
        f"{n}.png" for n in ("reward", "stability", "stages", "throughput", "gantt")
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in made.pictures)
    assert made.problems == {RUN: []}
    shown = visible(page)
    assert "steps committed 3 of 3" in shown
    assert "episodes trained 35 of 48" in shown
    assert "dropped 1 grading_failed, 12 zero_variance" in shown


def test_nothing_is_fetched_and_no_script_is_there(whole: tuple[Written, str]):
    page = whole[1]
    parsed = _Texts(page)
    assert [address for address in parsed.addresses if not address.startswith("#")] == []
    assert parsed.tags.isdisjoint({"script", "link", "iframe", "object", "embed", "img", "base"})
    assert "default-src 'none'" in page
    assert "url(" not in page.replace("url(#", "")


def test_samples_are_the_best_the_median_and_the_worst_of_each_phase(whole: tuple[Written, str]):
    shown = visible(whole[1])
    beginning, middle, end = re.split(r"The (?:beginning|middle|end): batch ", shown)[1:]
    assert re.findall(r"(best|median|worst) ([\d.]+)", beginning) == [("best", "1"), ("median", "0"), ("worst", "0")]
    assert middle.startswith("1 ")
    assert "exact_match 1 prompt add 2 and 3 answer answer 2 0 1" in end
    assert "first/00000002/00000000/00000001" in end


def test_hostile_completions_are_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(example, "text_of", lambda *_: HOSTILE)
    hostile = example_run(open_store(f"memory://{os.urandom(8).hex()}"))
    _, body = texts_of(hostile)
    parsed = _Texts(body)
    assert parsed.tags.isdisjoint({"script", "img"})
    assert "<script>window.hacked = 1</script>" in "".join(parsed.found)
    assert "\x00" not in body
    assert "\x1b" not in body


def test_control_characters_are_shown_and_long_texts_are_cut():
    assert text("a\x00\x1b\n<b>") == "a␀␛\n&lt;b&gt;"
    assert text("x" * 7000).endswith("… (1,000 more characters)")


def test_a_run_that_has_just_begun_has_a_report(store: Store, tmp_path: Path):
    create_run(store, load_config({"run": {"id": "new"}, "rewards": {"functions": [{"path": "exact_match"}]}}))
    made, page = written(store, tmp_path / "out", "new")
    assert made.pictures == []
    assert "No training step was committed." in visible(page)


def test_a_run_that_crashed_before_its_first_step_shows_what_it_sampled(store: Store, tmp_path: Path):
    for key in store.list(f"{layout.run(RUN)}ledger"):
        store.delete(key)
    record_failure(store, RUN, "trainer", RuntimeError("CUDA out of memory"))
    made, page = written(store, tmp_path / "out")
    shown = visible(page)
    assert "No training step was committed." in shown
    assert "RuntimeError: CUDA out of memory" in shown
    assert "The end: batch 2" in shown
    assert [file.name for file in made.pictures] == ["gantt.png"]


def damaged(store: Store, key: str, body: bytes = b"torn") -> str:
    assert store.folder is not None
    (store.folder / key).write_bytes(body)
    return key


def keys_of(store: Store, kind: str, ending: str) -> list[str]:
    return [key for key in store.list(f"{layout.run(RUN)}{kind}") if key.endswith(ending)]


def test_what_is_damaged_or_missing_is_named_and_the_rest_is_shown(store: Store, tmp_path: Path):
    rewards = damaged(store, keys_of(store, "rewards", ".parquet")[0])
    manifest = damaged(store, keys_of(store, "episodes", "manifest.json")[1], b'{"not": "a manifest"}')
    metrics = damaged(store, layout.metrics(RUN, 0))
    entry = damaged(store, layout.ledger(RUN, 1), b"{")
    gone = keys_of(store, "reference", "manifest.json")[0]
    store.delete(gone)
    made, page = written(store, tmp_path / "out")
    said = "\n".join(made.problems[RUN])
    for key in (rewards, manifest, metrics, entry, gone.removesuffix("manifest.json")):
        assert key in said, key
        assert key in visible(page)
    assert "steps committed 2 of 3" in visible(page)
    assert "reward.png" in {file.name for file in made.pictures}


def test_a_damaged_configuration_hides_nothing_else(store: Store):
    damaged(store, layout.run_json(RUN), b"\xff\xfe")
    facts, page = texts_of(store)
    assert layout.run_json(RUN) in facts.problems[0]
    assert "steps committed 3 of unknown" in visible(page)


def test_a_gap_in_the_ledger_is_named(store: Store, tmp_path: Path):
    store.delete(layout.ledger(RUN, 1))
    assert f"{layout.ledger(RUN, 1)} is missing, but later steps are committed" in collect(store, RUN).problems


def test_several_runs_are_compared_with_the_settings_that_differ(store: Store, tmp_path: Path):
    example_run(store, "second", steps=2)
    made, page = written(store, tmp_path / "out", RUN, "second")
    assert [file.name for file in made.pictures if file.name.startswith("comparison")] == [
        "comparison-reward.png", "comparison-stability.png",
    ]  # fmt: skip
    assert {"first-reward.png", "second-reward.png"} <= {file.name for file in made.pictures}
    shown = visible(page)
    assert "Settings that differ key first second steps 3 2" in shown
    assert "steps committed 3 of 3 2 of 2" in shown


def test_what_one_of_several_runs_has_is_shown_in_any_order(store: Store, tmp_path: Path):
    create_run(store, load_config({"run": {"id": "empty"}}))
    for order in (("empty", RUN), (RUN, "empty")):
        _, page = written(store, tmp_path / order[0], *order)
        (table,) = re.findall(r"Side by side</h3>.*?</table>", page, flags=re.DOTALL)
        assert "episodes" in visible(table), order


def test_settings_differ_by_key_and_a_missing_one_is_said():
    configs = {
        "a": {"x": {"y": 1e-5, "z": [1, 2]}, "run": {"id": "a"}},
        "b": {"x": {"y": 1e-6, "z": [1]}, "run": {"id": "b"}},
    }
    assert differences(configs) == [("x.y", ["1e-05", "1e-06"]), ("x.z.1", ["2", "–"])]


def test_the_timeline_has_every_role_where_its_provenance_says(store: Store):
    found = spans(collect(store, RUN))
    start = example.START.timestamp()
    work = {(s.role, s.label): (s.start - start, s.end - start) for s in found if s.kind in ("work", "train")}
    assert work["generator", "1"] == (14.0, 16.0)  # its second shard; the first ended a second before
    assert work["trainer", "1"] == (19.0, 20.0)  # after loading and two seconds of training
    assert [(s.label, s.start - start, s.end - start) for s in found if s.kind == "wait"] == [
        ("1", 10.0, 17.0), ("2", 20.0, 27.0),
    ]  # fmt: skip
    lanes = dict(in_lanes(found))
    assert {role: len(rows) for role, rows in lanes.items()} == {
        "generator": 2,
        "scorer": 2,
        "reference": 2,
        "trainer": 1,
    }


def test_no_two_spans_of_a_row_overlap_and_processes_share_none():
    made = [Span("generator", lane, start, start + 2.0, "work", "0") for lane in "ab" for start in (0.0, 1.0, 2.0, 5.0)]
    ((_, rows),) = in_lanes(made)
    assert len(rows) == 4
    for row in rows:
        assert len({span.lane for span in row}) == 1
        assert all(a.end <= b.start for a, b in pairwise(row))


def test_evaluations_are_drawn_at_the_version_that_they_evaluate():
    made = [entry(5, **{"eval/version": 5, "eval/reward/mean": 0.5, "eval/reward/low": 0.4, "eval/reward/high": 0.6}),
            entry(9, **{"eval/version": 10, "eval/reward/mean": 0.7, "eval/before/version": 9,
                        "eval/before/reward/mean": 0.6})]  # fmt: skip
    assert held_out(made) == [(5, 0.5, 0.4, 0.6), (9, 0.6, 0.6, 0.6), (10, 0.7, 0.7, 0.7)]


def test_a_mean_that_is_rounded_past_its_interval_is_drawn(tmp_path: Path):
    entries = learning_run(5)
    entries[2]["metrics"] |= {"eval/version": 2, "eval/reward/mean": 0.1, "eval/reward/low": 0.1 + 2e-17 + 1e-16,
                              "eval/reward/high": 0.1 - 1e-16}  # fmt: skip
    reward = next(one for one in curves_of(entries) if one.name == "reward")
    assert png(reward.draw, tmp_path / "curve.png")


def test_the_reward_curve_has_both_curves(tmp_path: Path):
    from matplotlib.image import imread

    reward = next(one for one in curves_of(learning_run(60)) if one.name == "reward")
    assert png(reward.draw, tmp_path / "curve.png")
    image = imread(tmp_path / "curve.png")[:, :, :3] * 255
    for colour in ((0x57, 0x93, 0xC7), (0xC2, 0x57, 0x0C)):  # blue at 75 % on white, orange
        assert (abs(image - colour).sum(axis=2) < 60).sum() > 300


@pytest.mark.parametrize("name", ["$\\frac{$", "_hidden", "<b>&", "α" * 40])
def test_names_of_rewards_are_no_markup_of_the_plotting_library(name: str, tmp_path: Path):
    entries = [entry(b, **{f"reward/{name}/mean": 0.1 * b, "reward/other/mean": 0.2}) for b in range(3)]
    components = next(one for one in curves_of(entries) if one.name == "components")
    assert png(components.draw, tmp_path / "curve.png")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_value_that_is_not_finite_is_a_gap(value: Any, tmp_path: Path):
    entries = learning_run(5)
    entries[2]["metrics"] |= {"reward/mean": value, "loss": value}
    assert [png(one.draw, tmp_path / "curve.png") for one in curves_of(entries)].count(True) == 2


def test_the_command_writes_beside_itself_and_names_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    store = example_run(open_store("forge-store"))
    damaged(store, layout.metrics(RUN, 0))
    assert main(["report", RUN, "--store", "forge-store"]) == 0
    said = capsys.readouterr()
    assert f"report: {tmp_path}/first-report/report.html" in said.out
    assert f"first: {layout.metrics(RUN, 0)}" in said.err
    assert (tmp_path / "first-report" / "reward.png").exists()


@pytest.mark.parametrize("words", [["report", "other"], ["report", "../x"], ["watch", "other", "--once"]])
def test_a_run_that_does_not_exist_is_bad_input(
    words: list[str], store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert main([*words, "--store", str(tmp_path / "store")]) == BAD_INPUT
    assert f"run '{words[1]}'" in capsys.readouterr().err


@pytest.mark.server
def test_a_report_of_a_run_on_s3(s3_store_uri: str, tmp_path: Path):
    made, page = written(example_run(open_store(f"{s3_store_uri}-report")), tmp_path)
    assert made.problems == {RUN: []}
    assert "The end: batch 2" in visible(page)


def test_entries_of_a_run_that_only_graded_again_have_no_fates(store: Store, tmp_path: Path):
    facts = collect(store, RUN)
    facts.entries = [{**entry, "episodes": 16} for entry in facts.entries]
    (_, summary), *_ = run_section(facts, [], [], []).parts
    assert "dropped" not in summary

"""The committed figures of ``make soak`` and of the simulation, and the documents that quote them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.faults import SCENES
from tests.docs.documents import ROOT, table_rows

SERVERS = {"prefect server", "s3 server"}


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def test_a_hundred_kills_of_every_kind_are_committed_each_with_its_cost():
    faults = result("faults")
    kinds = SERVERS | {kind for _, _, own in SCENES.values() for kind in own}
    assert faults["by_kind"].keys() == kinds
    assert len(faults["detail"]) == faults["kills"] == sum(k["kills"] for k in faults["by_kind"].values()) >= 100
    assert all(kill["lost_s"] >= 0 for kill in faults["detail"])
    assert all(kinds["recovery_s"]["median"] > 0 for kinds in faults["by_kind"].values())


def test_the_document_has_the_figures_of_the_kills():
    written = {row[0]: row[1:] for row in table_rows(ROOT / "docs" / "operating.md", "killed")}
    for kind, figures in result("faults")["by_kind"].items():
        times, lost, recovery = written[kind]
        assert int(times) == figures["kills"]
        for shown, key in ((lost, "lost_s"), (recovery, "recovery_s")):
            assert shown == f"{figures[key]['median']:g} s ({figures[key]['max']:g} s)"


def test_the_document_has_the_figures_of_the_simulation():
    simulated, text = result("store_simulation"), (ROOT / "docs" / "object-storage.md").read_text()
    shape = simulated["shape"]
    assert (shape["generators"], shape["ranks"]) == (64, 8)
    asked = sum(simulated["requests_per_step"].values())
    assert f"asked {round(asked, -2):,.0f} requests" in text
    assert f"{round(simulated['requests_per_second'], -1):.0f} requests a second" in text
    assert f"{100 * simulated['usd_per_step']:.1f} cents a step" in text
    assert f"Of {simulated['claims_tried']} claims {simulated['claim_collisions']} were" in text


@pytest.mark.parametrize("line", re.findall(r"-m (benchmarks\..*)", (ROOT / "Makefile").read_text()))
def test_what_make_soak_runs_is_there_and_takes_its_arguments(line: str):
    module, *arguments = line.split()
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    for flag in arguments[::2]:
        assert f'add_argument("{flag}", type=int' in source
    assert 'write("' in source, "its figures go to benchmarks/results, or below $OUT"

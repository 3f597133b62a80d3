"""Every vector that a peer's code produced, against our library: values and gradients at the stated tolerances.

Where a peer returns nan or inf on valid input, ours must be finite (``entropy`` with impossible tokens, means over
nothing, advantages of a group of one): such numbers are not compared.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import adapter, rules

HERE = Path(__file__).parent
COUNTED = ("policy_loss", "kl", "aggregation", "advantages", "logprobs")
SHARE = 0.9


@cache
def vectors(family: str) -> list[dict[str, Any]]:
    return json.loads((HERE / "vectors" / f"{family}.json").read_text())


FAMILIES = sorted(path.stem for path in (HERE / "vectors").glob("*.json"))
GROUPS = [
    pytest.param(family, peer, algorithm, id=f"{family}-{peer}-{algorithm}")
    for family in FAMILIES
    for peer, algorithm in sorted({(v["peer"], v["algorithm"]) for v in vectors(family)})
]


def flat(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for item in value:
            yield from flat(item)
    else:
        yield float(value)


def differences(vector: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The outputs that differ, each with its largest difference."""
    wrong = []
    for key, expected in vector["outputs"].items():
        pairs = list(zip(flat(found[key]), flat(expected), strict=True))
        gaps = [abs(x - y) for x, y in pairs if math.isfinite(y) and not close(x, y, vector)]
        if gaps or not all(math.isfinite(x) for x, _ in pairs):
            wrong.append(f"{key}: off by {max(gaps, default=math.nan):.3g}")
    return wrong


def close(x: float, y: float, vector: dict[str, Any]) -> bool:
    return abs(x - y) <= vector["atol"] + vector["rtol"] * abs(y)


@pytest.mark.parametrize(("family", "peer", "algorithm"), GROUPS)
def test_what_is_adopted_equals_the_peers_numbers(family: str, peer: str, algorithm: str) -> None:
    wrong = {}
    for vector in vectors(family):
        if (vector["peer"], vector["algorithm"]) == (peer, algorithm):
            found = adapter.evaluate(vector)
            if found is not None and (differs := differences(vector, found)):
                wrong[vector["name"]] = differs
    assert not wrong


@pytest.mark.parametrize("family", COUNTED)
def test_at_least_nine_in_ten_are_reproduced(family: str) -> None:
    reproduced = sum(adapter.evaluate(vector) is not None for vector in vectors(family))
    assert reproduced >= SHARE * len(vectors(family)), f"{reproduced} of {len(vectors(family))}"


def test_there_are_as_many_vectors_as_their_makers_say() -> None:
    assert sum(len(vectors(family)) for family in FAMILIES) == 827


def test_every_vector_left_out_has_its_row_and_every_row_its_vectors() -> None:
    table = (HERE / "not_adopted.md").read_text()
    rows = {cells[1]: int(cells[2]) for cells in re.findall(r"^(\| (.+?) \| (\d+) \|)", table, re.MULTILINE)}
    left_out = Counter(reason for f in FAMILIES for v in vectors(f) if (reason := adapter.why_not(v)))
    assert rows == dict(left_out)
    assert set(rows) == set(rules.RULES)


def test_what_is_left_out_really_differs() -> None:
    """A rule must not hide vectors that we reproduce, but for the one that cannot tell verl's two functions apart."""
    everything = [v for family in FAMILIES for v in vectors(family)]
    left_out = [v for v in everything if adapter.why_not(v) not in (None, "graded elsewhere")]
    hidden = [v["name"] for v in left_out if not differences(v, adapter.compute(v))]
    assert hidden == ["adv/rloo/verl/s4_group1"]


def test_only_the_documented_parts_of_a_vector_are_read() -> None:
    for family in COUNTED:
        for vector in vectors(family)[:20]:
            bare = {key: vector[key] for key in ("algorithm", "peer", "inputs", "params")}
            assert adapter.evaluate(bare) == adapter.evaluate(vector)

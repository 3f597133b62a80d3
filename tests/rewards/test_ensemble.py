"""Weak verifiers: accuracies told from agreement, the vote, missing verifiers; on generated votes and real rewards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.config import ConfigError, load_config
from forge_core.config.reward_sections import EnsembleSection
from forge_core.rewards import RewardActor, RewardError, RewardItem
from forge_core.rewards.agreement import estimate, probability_good
from forge_core.rewards.identity import reward_identity

HIT = np.array([0.9, 0.85, 0.6, 0.6, 0.55, 0.6, 0.65])  # two good verifiers among weak ones
REJECT = np.array([0.9, 0.8, 0.6, 0.6, 0.6, 0.55, 0.6])


def planted(seed: int, items: int, prior: float = 0.4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    good = rng.random(items) < prior
    share = np.where(good[:, None], HIT, 1 - REJECT)
    return good, (rng.random((items, len(HIT))) < share).astype(float)


def right(votes: np.ndarray, good: np.ndarray) -> tuple[float, float]:
    """Share of items that the weighted vote gets right, and that the majority does."""
    weighted = probability_good(votes, estimate(votes)) > 0.5
    return float(np.mean(weighted == good)), float(np.mean((votes.mean(axis=1) > 0.5) == good))


def test_planted_accuracies_are_recovered_without_labels():
    good, votes = planted(0, 5000)
    found = estimate(votes)
    assert found.hit == pytest.approx(HIT, abs=0.05)
    assert found.reject == pytest.approx(REJECT, abs=0.05)
    assert found.prior == pytest.approx(0.4, abs=0.03)
    assert found.accuracy == pytest.approx(np.mean(votes == good[:, None], axis=0), abs=0.03)


def test_the_weighted_vote_beats_the_majority():
    shares = np.array([right(votes, good) for good, votes in (planted(seed, 500) for seed in range(20))])
    assert shares.mean(axis=0) == pytest.approx([0.91, 0.835], abs=0.02)
    assert (shares[:, 0] > shares[:, 1]).all()


def test_the_weighted_vote_beats_the_majority_in_a_small_shard():
    shares = np.array([right(votes, good) for good, votes in (planted(seed, 64) for seed in range(60))])
    assert shares[:, 0].mean() > shares[:, 1].mean() + 0.05


def test_missing_votes_do_not_mislead():
    good, votes = planted(1, 5000)
    votes[np.random.default_rng(2).random(votes.shape) < 0.3] = np.nan
    found = estimate(votes)
    assert found.hit == pytest.approx(HIT, abs=0.08)
    assert right(np.where(np.isnan(votes), 0.5, votes), good)[1] < right(votes, good)[0]


@pytest.mark.parametrize("row", [[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0, 0, 1]])
def test_one_item_alone_gets_the_majoritys_vote(row: list[float]):
    votes = np.array([row], dtype=float)
    assert (probability_good(votes, estimate(votes))[0] > 0.5) == (np.mean(row) > 0.5)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, np.nan]), min_size=4, max_size=4), max_size=20), st.randoms())
def test_order_does_not_matter_and_probabilities_are_numbers(rows: list[list[float]], random):
    votes = np.array(rows, dtype=float).reshape(-1, 4)
    order = list(range(len(rows)))
    random.shuffle(order)
    found = probability_good(votes, estimate(votes))
    assert np.all((found > 0) & (found < 1))
    turned = votes[order][:, ::-1]
    assert probability_good(turned, estimate(turned)) == pytest.approx(found[order], abs=1e-4)


SOURCE = """
def votes(prompt, completion, metadata, place=0):
    value = completion.split(",")[place]
    if value == "?":
        raise RuntimeError("the verifier is down")
    return float(value)
"""


@pytest.fixture
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    (tmp_path / "weak.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return [{"path": "weak.py:votes", "options": {"place": place}} for place in range(len(HIT))]


def test_real_rewards_vote_and_their_grades_are_in_the_components(verifiers: list[dict]):
    good, votes = planted(3, 400)
    items = [RewardItem("p", ",".join(map(str, row))) for row in votes]
    actor = RewardActor([EnsembleSection(name="ensemble", verifiers=verifiers, decision=True, weight=2.0)])
    try:
        graded, metrics = actor.grade_with_metrics(items)
        again = actor.grade_many(items)
    finally:
        actor.close()
    expected = probability_good(votes, estimate(votes)) > 0.5
    assert [g.reward for g in graded] == list(2.0 * expected)
    assert again == graded
    names = ["votes", *(f"votes#{n}" for n in range(2, 8))]
    assert graded[0].components == {
        "ensemble": float(expected[0]),
        **{f"ensemble/{name}": vote for name, vote in zip(names, votes[0], strict=True)},
    }
    assert metrics["ensemble/votes/accuracy"] > 0.8 > metrics["ensemble/votes#3/accuracy"]
    assert metrics["ensemble/prior"] == pytest.approx(good.mean(), abs=0.1)
    assert [name for name in metrics if name.endswith("grades_per_second")] == ["grades_per_second"]


def test_a_failed_verifier_is_null_unless_some_may_be_missing(verifiers: list[dict]):
    rows = ("1,1,1,1,1,1,1", "1,1,1,?,1,1,1", "?,?,1,1,1,1,1", "0,0,0,0,0,0,0")
    items = [RewardItem("p", row) for row in rows]
    for missing, nulls in ((0, [1, 2]), (1, [2]), (2, [])):
        actor = RewardActor([EnsembleSection(name="ensemble", verifiers=verifiers, missing=missing)])
        try:
            graded = actor.grade_many(items)
        finally:
            actor.close()
        assert [i for i, g in enumerate(graded) if g.reward is None] == nulls
        if nulls:
            assert "RuntimeError: the verifier is down" in (graded[2].error or "")
        assert graded[0].reward > 0.5 > graded[3].reward


def test_the_mean_of_a_response_does_not_count_the_votes(verifiers: list[dict]):
    actor = RewardActor([EnsembleSection(name="ensemble", verifiers=verifiers, decision=True)])
    try:
        components, mean = actor.evaluate_response("p", "1,1,1,1,0,1,1", None)
    finally:
        actor.close()
    assert mean == components["ensemble"] == 1.0
    assert components["ensemble/votes#5"] == 0.0


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"verifiers": [{"name": "thinking"}] * 2}, r"verifiers: is .*at least 3|at least 3 items|must be a list"),
        ({"verifiers": [{"name": "thinking"}] * 2 + [{"name": "math", "take": "middle"}]}, "verifier 2: take: Input"),
        ({"verifiers": [{"name": "thinking"}] * 2 + [{"name": "ensemble"}]}, "verifier 2: "),
        ({"verifiers": [{"name": "thinking"}] * 2 + [{"weight": 1}]}, "verifier 2: path: Field required"),
    ],
)
def test_a_verifier_that_cannot_be_is_named(changed: dict, problem: str):
    with pytest.raises(ConfigError, match=problem):
        load_config({"rewards": {"functions": [{"name": "ensemble", **changed}]}})


def test_too_many_missing_verifiers_are_refused(verifiers: list[dict]):
    with pytest.raises(RewardError, match="7 verifiers of which 5 may be missing: three must be left"):
        RewardActor([EnsembleSection(name="ensemble", verifiers=verifiers, missing=5)])


def test_verifiers_count_as_code_of_the_configuration(verifiers: list[dict], tmp_path: Path):
    ensemble = {"name": "ensemble", "verifiers": [*verifiers, {"name": "math"}]}
    config = load_config({"rewards": {"functions": [ensemble]}})
    full = str(tmp_path / "weak.py:votes")
    for path in ("ensemble", "forge_core.rewards.ensemble:Ensemble"):  # another name hides no code
        hidden = load_config({"rewards": {"functions": [{"path": path, "options": {"verifiers": verifiers}}]}})
        assert [name.rpartition("/")[2] for name in hidden.rewards.paths] == [path, *["weak.py:votes"] * 7]
    assert config.rewards.paths == ["ensemble", *[full] * 7, "math"]
    before = reward_identity(config.rewards.functions)
    (tmp_path / "weak.py").write_text(SOURCE + "# changed\n")
    assert reward_identity(config.rewards.functions) != before

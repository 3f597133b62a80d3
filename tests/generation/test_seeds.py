"""Seeds of samples."""

from __future__ import annotations

import itertools

from forge_core.generation.seeds import sample_seed


def test_a_seed_never_changes_between_releases():
    # Stored runs are replayed from these: a new value here would break every resume.
    assert sample_seed(0, 0, 0, 0, 0) == 3046357356119437928
    assert sample_seed(7, 12, 1, 3, 5) == 3689187133639496578


def test_each_place_in_the_run_has_its_own_63_bit_seed():
    places = list(itertools.product(range(3), range(4), range(2), range(5), range(5)))
    seeds = [sample_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, 1, 11, 0, 0) != sample_seed(0, 11, 1, 0, 0)

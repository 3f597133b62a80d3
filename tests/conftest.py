"""Shared fixtures, and the tiers: a test without another tier's marker is ``fast``."""

from __future__ import annotations

import pytest

pytest_plugins = ["tests.fixtures_prefect", "tests.fixtures_s3"]

SLOWER_TIERS = ("server", "engine", "soak")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in SLOWER_TIERS):
            item.add_marker(pytest.mark.fast)

"""Shared fixtures, and the tiers: a test without another tier's marker is ``fast``."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

pytest_plugins = ["tests.fixtures_disk", "tests.fixtures_postgres", "tests.fixtures_prefect", "tests.fixtures_s3"]

SLOWER_TIERS = ("server", "engine", "soak")

gc.disable()  # until all tests are collected: that makes millions of objects, and nearly all of them stay


@pytest.fixture(scope="session", autouse=True)
def forge_home_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs and databases of tests lie in no home that a person uses."""
    patch = pytest.MonkeyPatch()
    patch.setenv("FORGE_HOME", str(tmp_path_factory.mktemp("home")))
    yield
    patch.undo()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in SLOWER_TIERS):
            item.add_marker(pytest.mark.fast)


def pytest_unconfigure() -> None:
    """Threads of Prefect may log until the process ends, and its handlers hold the stream that stood in for standard
    error when they were made: that of a test, which is closed by then."""
    for logger in [logging.getLogger(name) for name in (None, *logging.Logger.manager.loggerDict)]:
        for handler in list(logger.handlers):
            if type(handler).__module__.startswith("prefect."):
                logger.removeHandler(handler)


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection looks at them again
    gc.enable()

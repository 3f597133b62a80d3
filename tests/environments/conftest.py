"""The ``forge`` command, as the tests of the command have it."""

from tests.cli.conftest import folder, forge  # noqa: F401
